"""Measure the compiler: `python -m bench_run compile`, or `tools/bench compile`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench_run.compiling import COUNTS, measure
from commplan.language import library


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    compiling = commands.add_parser("compile", help="time of `commplan check`, and how it grows with the number of modules")
    compiling.add_argument("--schedule", default="pipelined_allreduce", choices=library.names(), metavar="NAME")
    compiling.add_argument("--runs", type=int, default=7, help="runs of each, the median counts (%(default)s)")
    counts = ",".join(map(str, COUNTS))
    compiling.add_argument("--modules", type=_counts, default=COUNTS, help=f"two or more numbers of modules ({counts})")
    compiling.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    figures = measure(options.schedule, options.runs, options.modules)
    print("\n".join(shown(figures)))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _counts(text: str) -> tuple[int, ...]:
    """Numbers of modules, ascending."""
    found = tuple(sorted({int(part) for part in text.split(",")}))
    if len(found) < 2 or found[0] < 1:
        raise argparse.ArgumentTypeError("two or more numbers, as in 100,1000")
    return found


def shown(figures: dict[str, Any]) -> list[str]:
    """The figures for people."""
    process, growth = figures["process"], figures["growth"]
    (fastest, slowest), (torch_fastest, torch_slowest) = process["check_range_s"], process["import_torch_range_s"]
    lines = [
        f"commplan check {process['schedule']} --modules {process['num_modules']}, whole process, medians of {process['runs']}",
        f"  check         {process['check_s']:7.3f} s  ({fastest:.3f} to {slowest:.3f})",
        f"  import torch  {process['import_torch_s']:7.3f} s  ({torch_fastest:.3f} to {torch_slowest:.3f})",
        f"  ratio         {process['ratio']:7.3f}",
        f"check and compile {growth['schedule']}, one process as `commplan` sets it up, medians of {growth['runs']}",
    ]
    exponents = ("", *(f"  grows as N^{exponent:.2f}" for exponent in growth["exponents"]))
    by_count = growth["check_and_compile_s"].items()
    lines += [f"  {count:>6} modules  {time_s:8.3f} s{told}" for (count, time_s), told in zip(by_count, exponents, strict=True)]
    return [*lines, f"  the last takes {growth['last_factor']:.1f} times the one before"]


if __name__ == "__main__":
    sys.exit(main())
