"""Measurements that a person can run: `python -m bench_run WHAT`, or `tools/bench WHAT`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_run.launch import WorkerError

from bench_run import compiling, host, scale, truth, truth_figures, tuner, twohost, twohost_figures
from bench_run.refusal import RefusedError
from commplan.language import library


def _no_problems(figures: Any) -> list[str]:
    return []


@dataclass(frozen=True)
class Bench:
    """One measurement: its options, how it is done, how its figures (plain data) are shown, and what must not be in them."""

    told: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Any]
    shown: Callable[[Any], list[str]]
    problems: Callable[[Any], list[str]] = _no_problems


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit status: 0, 1 where something went wrong, 2 where it can't be measured here."""
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
    try:
        figures = bench.measure(options)
    except RefusedError as refused:
        return _fail(options.command, str(refused), 2)
    except WorkerError as error:
        return _fail(options.command, str(error), 1)
    except KeyboardInterrupt:
        return _fail(options.command, "interrupted; nothing was left running", 130)
    print("\n".join(bench.shown(figures)))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    wrong = bench.problems(figures)
    return _fail(options.command, "; ".join(wrong), 1) if wrong else 0


def _fail(command: str, line: str, status: int) -> int:
    print(f"tools/bench {command}: {line}", file=sys.stderr)
    return status


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
    "twohost": Bench(
        "backward on two hosts with a slow link between them (needs root): stock FSDP2, every schedule, and the limit",
        twohost.add_options,
        twohost.measure,
        twohost_figures.shown,
        twohost_figures.problems,
    ),
    "simulator": Bench(
        "what the simulator predicts of schedules, against what two hosts with a slow link between them measure (needs root)",
        truth.add_options,
        truth.measure,
        truth_figures.shown,
        truth_figures.problems,
    ),
    "tuner": Bench(
        "what `commplan tune` finds, against brute force and the library; as root, on two hosts with a slow link too",
        tuner.add_options,
        tuner.measure,
        tuner.shown,
        tuner.problems,
    ),
    "host": Bench(
        "what the host pays in backward: microseconds a module, stock FSDP2 against a schedule, on a fake process group",
        host.add_options,
        host.measure,
        host.shown,
    ),
    "scale": Bench(
        "time and memory of a plan as modules and ranks grow, on a fake process group",
        scale.add_options,
        scale.measure,
        scale.shown,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
