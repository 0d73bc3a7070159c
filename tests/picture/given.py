"""What tests of reports share: a profile, and measured runs made of predictions."""

from __future__ import annotations

from dataclasses import replace

import commplan
from commplan.language.modules import ModuleTable
from commplan.language.profiles import Profile, parse_profile
from commplan.sight.intervals import Interval
from commplan.sight.runs import Run
from commplan.simulate import Simulated, costs, memory, report, simulate

PROFILE = """\
version: 1
name: units
source: made up
compute_s: {default: 0.010}
axes:
  shard: {link: a, all_gather: {points: [[0, 0.001]]}, reduce_scatter: {points: [[0, 0.004]]}}
  replicate: {link: b, all_reduce: {points: [[0, 0.008]]}}
host: {issue_s: 0.0001, apply_s: 0.0003}
"""

NUM_MODULES = 6


def profile() -> Profile:
    return parse_profile(PROFILE)


def simulated(schedule: str, modules: int | ModuleTable = NUM_MODULES, **params: int) -> Simulated:
    plan = commplan.compile(schedule, modules, **params)
    return simulate(plan, costs(plan, profile()))


def run_like(one: Simulated, rank: int = 0, times: float = 1.1, begin_s: float = 100.0) -> Run:
    """What a rank would have saved whose clock began at `begin_s` and which took `times` as long as predicted."""
    told = report(one)

    def moved(interval: Interval) -> Interval:
        issued_s = None if interval.issued_s is None else begin_s + times * interval.issued_s
        return replace(
            interval, begin_s=begin_s + times * interval.begin_s, end_s=begin_s + times * interval.end_s, issued_s=issued_s
        )

    ran = replace(
        told,
        begin_s=begin_s,
        end_s=begin_s + times * told.end_s,
        ops=[moved(op) for op in told.ops],
        compute_waits=[moved(wait) for wait in told.compute_waits],
        number=7,
        memory=[(begin_s + times * point.begin_s, point.size_bytes) for point in memory(one)],
    )
    return Run(rank, {"replicate": rank // 2, "shard": rank % 2}, 1e9, ran)
