"""The picture of a report: `python -m demo_run.draw_report [OUT.png]`, or `tools/draw_report`.

What is drawn is predicted, under the profile that docs/simulate.md shows.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import commplan
from commplan.language.profiles import parse_profile
from commplan.picture import content, page
from commplan.simulate import costs, simulate
from demo_run.chromium import NoBrowserError, browser

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
DEFAULT_OUT: Final = DOCS / "report.png"
SCHEDULES: Final = ("prefetch_overlap", "blocking")
NUM_MODULES: Final = 12
MEMORY_CAP_BYTES: Final = 20 << 20
VIEWPORT: Final = {"width": 1060, "height": 1085}
POINTED_AT: Final = "AR_4"
PLACE: Final = """(name) => {
  const { canvas, drawing, panel } = window.commplan.timelines[1];
  const bar = panel.bars.find((one) => one.name === name && one.kind === "all_reduce");
  const box = canvas.getBoundingClientRect();
  return [box.left + drawing.x((bar.begin + bar.end) / 2), box.top + drawing.rowTop(bar.lane) + 8];
}"""


def report() -> str:
    """The page."""
    found = re.search(r"^```yaml\n(version:.*?)^```$", (DOCS / "simulate.md").read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None
    profile = parse_profile(found[1])
    plans = [commplan.compile(name, NUM_MODULES) for name in SCHEDULES]
    return page(content([simulate(plan, costs(plan, profile)) for plan in plans], [], profile, MEMORY_CAP_BYTES)).html


def draw(started: Any, out: Path) -> None:
    """A picture of the page in a browser: both timelines, and the mouse on an op of the second."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(report(), encoding="utf-8")
        window = started.new_page(viewport=VIEWPORT, color_scheme="light", reduced_motion="reduce")
        window.goto(file.as_uri())
        # What is unfolded below a timeline would need much room.
        window.add_style_tag(content="details, #details { display: none !important; }")
        window.wait_for_function("() => window.commplan.timelines.every((one) => one.isVisible)")
        window.mouse.move(*window.evaluate(PLACE, POINTED_AT))
        window.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        window.screenshot(path=str(out))
        window.close()


def main(arguments: Sequence[str]) -> int:
    """Draw; the exit status."""
    out = Path(arguments[0]) if arguments else DEFAULT_OUT
    try:
        with browser() as started:
            draw(started, out)
    except NoBrowserError as error:
        print(f"tools/draw_report: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
