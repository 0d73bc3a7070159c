"""Check the library, print a plan, train with it, show what overlaps: `python -m demo_run`, or `tools/demo`."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from commplan import compile as compile_plan
from commplan.compiler import check
from commplan.errors import CommplanError, Severity
from commplan.language import library, resolve
from demo_run import show
from demo_run.launch import WorkerError, run_workers
from demo_run.page import write_page
from demo_run.report import merge, problems, write_summary
from demo_run.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
_SHOWN = "pipelined_allreduce"
_NUM_SHOWN_MODULES = 4
_TABLE_WIDTH = 100


def main(arguments: list[str] | None = None) -> int:
    """Run all parts; the exit status: 0, or 1 with one line on standard error."""
    settings, out, page = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    begin_s = time.monotonic()
    try:
        out.mkdir(parents=True, exist_ok=True)
        wrong = _check_library(console) + _show_plan(console) + _run(console, settings, out, page)
    except (WorkerError, CommplanError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; the workers were ended") + 129
    for line in wrong[1:]:
        print(line, file=sys.stderr)
    if wrong:
        return _fail(wrong[0])
    console.print(f"\nDone in {time.monotonic() - begin_s:.0f} s; the figures are in {out / 'summary.json'}.", highlight=False)
    return 0


def _parse(arguments: list[str] | None) -> tuple[Settings, Path, Path]:
    default = Settings()
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=default.steps, help="training steps of every model (%(default)s)")
    parser.add_argument("--emulated-steps", type=int, default=default.emulated_steps, help="0 leaves that part out")
    parser.add_argument("--schedules", default=",".join(default.schedules), help="library names, separated by commas")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "demo", help="where the figures go")
    parser.add_argument("--report", type=Path, metavar="FILE", help="the page to look at (report.html beside the figures)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.emulated_steps < 0:
        parser.error("--steps must be at least 1, --emulated-steps at least 0")
    names = tuple(name.strip() for name in options.schedules.split(",") if name.strip())
    unknown = sorted(set(names) - set(library.names()))
    if unknown:
        parser.error(f"no schedule {', '.join(unknown)} in the library: {', '.join(library.names())}")
    settings = replace(default, steps=options.steps, emulated_steps=options.emulated_steps, schedules=names)
    return settings, options.out, options.report or options.out / "report.html"


def _check_library(console: Console) -> list[str]:
    show.heading(console, "The library, checked: every schedule gives the gradients of stock FSDP2, whatever it places where")
    wrong: list[str] = []
    for name in library.names():
        errors = [violation for violation in check(name) if violation.severity is Severity.ERROR]
        wrong += map(str, errors)
        sentence = resolve(name).summary.partition(". ")[0].rstrip(".")
        console.print(f"  {'fail' if errors else 'ok':<5}{name:<26}{sentence}.", markup=False, highlight=False, soft_wrap=True)
    return wrong


def _show_plan(console: Console) -> list[str]:
    show.heading(console, f"The plan of {_SHOWN} for {_NUM_SHOWN_MODULES} modules")
    console.print(compile_plan(_SHOWN, _NUM_SHOWN_MODULES).text().rstrip(), markup=False, highlight=False, soft_wrap=True)
    return []


def _run(console: Console, settings: Settings, out: Path, page: Path) -> list[str]:
    show.heading(
        console,
        f"Training a byte-level transformer of {settings.num_blocks} blocks on Python's standard library, "
        f"mesh ({settings.num_replicas}, {settings.num_shards})",
    )
    with show.progress(console) as tell:
        result = run_workers(settings, out, tell)
    rows = merge(result["train"])
    emulated = merge(result["emulated"]) if "emulated" in result else []
    write_summary(out / "summary.json", settings, rows, emulated, result.get("sleep_s", 0.0))
    console.print()
    console.print(show.training_table(rows))
    if emulated:
        console.print(
            "\nWith real compute, the threads that carry the collectives take cores from it, and little time is won. Below, "
            f"compute is emulated: backward sleeps {result['sleep_s'] * 1e3:.0f} ms a block where an accelerator "
            "would compute. The collectives are real.\n",
            highlight=False,
        )
        console.print(show.emulated_table(emulated))
    if settings.schedules:
        is_predicted = write_page(page, out, settings, emulated[-1]["backward_median_s"] if emulated else None)
        what = "measured and predicted" if is_predicted else "measured"
        console.print(
            f"\nTimelines, {what}, and why compute waited: open {page} in a browser.", highlight=False, soft_wrap=True
        )
    # The last row of the emulated part is the model without communication: nothing to hold it to.
    return problems(rows) + problems(emulated[:-1] if emulated else rows[:1])


def _fail(line: str) -> int:
    print(f"tools/demo: {line}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
