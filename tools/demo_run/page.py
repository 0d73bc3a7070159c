"""The report that the demonstration ends with: a typical backward of each schedule, beside what is predicted of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

import commplan
from commplan.language.profiles import Profile
from commplan.ops import Axis
from commplan.picture import content, page
from commplan.sight.runs import Run
from commplan.simulate import Simulated, costs, simulate
from demo_run.settings import Settings

CALIBRATION = "blocking"
"""In it each collective runs alone, so that it tells what they cost."""


def write_page(path: Path, folder: Path, settings: Settings, alone_s: float | None) -> bool:
    """Write a report of the runs that the workers left in `folder`.

    Args:
        alone_s: backward without communication, if it was measured: with it, and runs of `CALIBRATION`, each schedule is
            predicted too.

    Returns:
        Whether anything is predicted.

    Raises:
        CommplanError: a run can't be read, or the report is too large.
    """
    runs = {name: list(_runs(name, folder, settings.world_size)) for name in settings.schedules}
    profile = None
    if alone_s is not None and runs.get(CALIBRATION):
        profile = profile_of(runs[CALIBRATION], alone_s)
    predicted = [] if profile is None else list(_predicted(runs, profile))
    ran = [run for of_schedule in runs.values() for run in of_schedule]
    made = page(content(predicted, ran, profile), f"tools/demo, commplan {commplan.__version__}")
    path.write_text(made.html, encoding="utf-8", newline="\n")
    return profile is not None


def run_path(folder: Path, schedule: str, rank: int) -> Path:
    """Where a worker leaves its run of a schedule."""
    return folder / f"run-{schedule}-{rank}.json"


def profile_of(alone: Sequence[Run], alone_s: float) -> Profile:
    """What compute and collectives cost, from backwards of all ranks in which each collective ran alone.

    Modules are taken to be equal: each has one reduce-scatter and one all-reduce.
    """
    (plan,) = {run.report.plan.digest: run.report.plan for run in alone if run.report.plan is not None}.values()
    num_modules = len(plan.modules)
    rs_s, ar_s = (mean(op.end_s - op.begin_s for run in alone for op in run.report.ops if op.lane == axis) for axis in Axis)
    return Profile.model_validate(
        {
            "name": f"this machine, {num_modules} modules of emulated compute",
            "source": f"`tools/demo`: compute alone, and backwards under {CALIBRATION}, in which each collective runs alone",
            "compute_s": {"default": alone_s / num_modules},
            "axes": {
                Axis.SHARD: {"link": "host", "reduce_scatter": {"points": [[0, rs_s]]}},
                Axis.REPLICATE: {"link": "network", "all_reduce": {"points": [[0, ar_s]]}},
            },
        }
    )


def _runs(schedule: str, folder: Path, world_size: int) -> Iterator[Run]:
    for rank in range(world_size):
        path = run_path(folder, schedule, rank)
        yield Run.from_json(path.read_text(encoding="utf-8"), str(path))


def _predicted(runs: Mapping[str, Sequence[Run]], profile: Profile) -> Iterator[Simulated]:
    for name, of_schedule in runs.items():
        ran = of_schedule[0].report.plan
        assert ran is not None
        plan = commplan.compile(name, ran.modules)
        yield simulate(plan, costs(plan, profile))
