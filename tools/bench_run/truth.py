"""How near predictions come to what two hosts measure: calibrated with two schedules, asked about others."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench_run import truth_figures
from bench_run.refusal import RefusedError
from bench_run.truth_figures import CALIBRATION, Row, Setting
from bench_run.twohost import run_work
from bench_run.twohost_work import COSTS, MESH, Work

LOGS: Final = Path(__file__).resolve().parents[2] / "runs" / "bench_simulator"

SCHEDULES: Final = (
    *CALIBRATION,
    "overlapped_allreduce",
    "pipelined_allreduce",
    "delayed_allreduce",
    "windowed_allreduce",
    "bucketed_allreduce",
    "chunked",
    "eager_apply",
)
COMPUTE_MS: Final = ("180", "60")
RATES_MBIT: Final = (400.0, 800.0)


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `tools/bench simulator`."""
    told = "backwards of each schedule in each setting, the median counts (%(default)s)"
    command.add_argument("--rounds", dest="runs", type=int, default=6, metavar="N", help=told)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Rows and errors; see `truth_figures.figures`.

    Raises:
        RefusedError: not root, no network namespaces, or a schedule can't be attached.
        WorkerError: a worker failed, or all fell silent.
    """
    work = Work(SCHEDULES, COMPUTE_MS, rounds=options.runs, num_best=len(SCHEDULES), beside=COSTS)
    table = truth_figures.table_of(work.num_modules, work.dim, *MESH)
    known = Setting(float(COMPUTE_MS[0]), RATES_MBIT[0])
    rows: list[Row] = []
    elsewhere: list[Row] = []
    first = None
    by_rate = {}
    for rate_mbit in RATES_MBIT:
        print(f"{rate_mbit:g} Mbit/s between hosts", file=sys.stderr)
        timeout_s = work.timeout_s + work.longest_s(rate_mbit)
        by_rate[rate_mbit] = run_work(replace(work, timeout_s=timeout_s), rate_mbit, LOGS)
        if left_out := by_rate[rate_mbit]["left_out"]:
            raise RefusedError("; ".join(f"{name} can't be attached: {why}" for name, why in left_out.items()))
    for rate_mbit, compute_ms in product(RATES_MBIT, COMPUTE_MS):
        saw, setting = by_rate[rate_mbit]["settings"][compute_ms], Setting(float(compute_ms), rate_mbit)
        profile = truth_figures.calibrated(saw, table.modules[0], setting)
        rows += truth_figures.compared(saw, profile, table, setting, CALIBRATION)
        if first is None:
            first = profile
        else:
            elsewhere += truth_figures.compared(saw, truth_figures.moved(first, known, setting), table, setting, ())
    context = {key: by_rate[RATES_MBIT[0]][key] for key in ("machine", "torch")}
    return truth_figures.figures(rows, elsewhere) | context | {"rounds": work.rounds}
