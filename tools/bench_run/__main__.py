"""Measurements that a person can run: `python -m bench_run WHAT`, or `tools/bench WHAT`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_run import compiling
from commplan.language import library


@dataclass(frozen=True)
class Bench:
    """One measurement: its options, how it is done, and how its figures (plain data) are shown."""

    told: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Any]
    shown: Callable[[Any], list[str]]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(prog="tools/bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    for name, bench in BENCHES.items():
        command = commands.add_parser(name, help=bench.told, description=bench.told)
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
        bench.add_options(command)
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    bench = BENCHES[options.command]
    figures = bench.measure(options)
    print("\n".join(bench.shown(figures)))
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


def _milliseconds(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if min(found) < 0:
        raise argparse.ArgumentTypeError("numbers of milliseconds, as in 0,10")
    return found


def _schedule_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--schedule", default="pipelined_allreduce", choices=library.names(), metavar="NAME")


def _compile_options(command: argparse.ArgumentParser) -> None:
    _schedule_option(command)
    command.add_argument("--runs", type=int, default=7, help="runs of each, the median counts (%(default)s)")
    counts = ",".join(map(str, compiling.COUNTS))
    command.add_argument("--modules", type=_counts, default=compiling.COUNTS, help=f"two or more numbers of modules ({counts})")


def _rank_checks_options(command: argparse.ArgumentParser) -> None:
    _schedule_option(command)
    command.add_argument("--runs", type=int, default=20, help="backwards of each, the median counts (%(default)s)")
    command.add_argument("--modules", type=int, default=24, help="modules of 16 parameters (%(default)s)")
    command.add_argument(
        "--compute",
        type=_milliseconds,
        default=(0.0, 10.0),
        metavar="MS,MS",
        help="milliseconds that the backward of a module sleeps, as if an accelerator computed (0,10)",
    )


def _measure_rank_checks(options: argparse.Namespace) -> Any:
    from bench_run import rank_checks

    settings = [rank_checks.Setting(options.schedule, options.modules, ms, options.runs) for ms in options.compute]
    return rank_checks.measure(settings)


def _show_rank_checks(figures: Any) -> list[str]:
    from bench_run import rank_checks

    return rank_checks.shown(figures)


BENCHES = {
    "compile": Bench(
        "time of `commplan check`, and how it grows with the number of modules",
        _compile_options,
        lambda options: compiling.measure(options.schedule, options.runs, options.modules),
        compiling.shown,
    ),
    "rank_checks": Bench(
        "time of a backward without rank checks, with one a backward, and with one a reduction",
        _rank_checks_options,
        _measure_rank_checks,
        _show_rank_checks,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
