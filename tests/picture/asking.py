"""What tests of a page in a browser share: the page, and ways to ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commplan.picture import content, page
from tests.picture.given import profile, run_like, simulated

SCHEDULES = ("pipelined_allreduce", "bucketed_pipeline_depth2", "blocking")
CAP_BYTES = 12 << 20

# Tries of a canvas, from within the page.
PIXEL = """([number, time, y]) => {
  const { drawing } = window.commplan.timelines[number];
  const at = (value) => Math.round(value * drawing.ratio);
  return [...drawing.context.getImageData(at(drawing.x(time)), at(y), 1, 1).data].slice(0, 3);
}"""
NUM_COLORS = """(canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""
VIEW = "() => [window.commplan.view.begin, window.commplan.view.end]"
SELECTED = "() => { const { selected } = window.commplan.view; return selected && [selected.panel.number, selected.bar.name]; }"
BARS = "(number) => window.commplan.panels[number].bars"
COLOR = "(name) => window.commplan.colors[name]"


def write_report(path: Path) -> Path:
    """Three schedules under a cap, of which two were measured, one on two ranks."""
    one, two, three = map(simulated, SCHEDULES)
    runs = [run_like(one, 0, 1.1), run_like(one, 1, 1.2), run_like(two, 0, 1.05)]
    path.write_text(page(content([one, two, three], runs, profile(), CAP_BYTES)).html, encoding="utf-8")
    return path


def rgb(color: str) -> list[int]:
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]


# Observers are called in the order in which they were made: behind the page's own, it knows what is in view.
DRAWN = """() => new Promise((done) => {
  const observer = new IntersectionObserver(() => {
    observer.disconnect();
    requestAnimationFrame(() => requestAnimationFrame(done));
  });
  observer.observe(document.body);
})"""


def frame(opened: Any) -> None:
    """Let it draw."""
    opened.evaluate(DRAWN)


def view(opened: Any) -> tuple[float, float]:
    frame(opened)
    begin, end = opened.evaluate(VIEW)
    return begin, end


def told(opened: Any) -> str:
    frame(opened)
    return str(opened.inner_text("#details"))
