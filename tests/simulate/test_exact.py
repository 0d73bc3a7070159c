"""Simulated times, where nothing slows anything else: exact, on known cases and on random plans."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import commplan
from commplan.language import library
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis, Kind, OpId
from commplan.plan.model import COMMUNICATION, Backwards, BufferKind, OpStep, Plan
from commplan.simulate import ONE_BACKWARD, Costs, OpCost, Simulated, memory, report, simulate
from tests import mixtures
from tests.simulate import longest_path

BY_KIND = {Kind.REDUCE_SCATTER: 4, Kind.ALL_REDUCE: 8, Kind.APPLY: 0, Kind.ALL_GATHER: 0}


def ops_of(plan: Plan) -> list[OpStep]:
    return [step for step in plan.steps if isinstance(step, OpStep)]


def run(schedule: str, num_modules: int = 4, **params: int) -> Simulated:
    plan = commplan.compile(schedule, num_modules, **params)
    ops = {step.op: OpCost(latency_s=BY_KIND[step.kind]) for step in ops_of(plan)}
    return simulate(plan, Costs([10] * num_modules, ops))


HEAD = "version: 1\nname: mine\nsummary: One of mine.\npost_backward:\n"
ALL_WAITED = HEAD + (
    "  - RS_n: {after: compute_n}\n  - wait: RS_n\n  - AR_n: {after: RS_n}\n  - wait: AR_n\nroot:\n  - apply_n: {after: AR_n}\n"
)
AR_WAITED_LATER = HEAD + (
    "  - RS_n: {after: compute_n}\n  - AR_<n-1>: {after: RS_<n-1>}\n  - wait: AR_<n-1>\n  - wait: RS_<n-1>\n"
    "root:\n  - apply_n: {after: AR_n}\n"
)


@pytest.mark.parametrize(
    ("schedule", "units"),
    [
        (ALL_WAITED, 88),
        ("blocking", 88),
        (AR_WAITED_LATER, 72),
        ("pipelined_allreduce", 56),
        ("overlapped_allreduce", 52),
        ("prefetch_overlap", 52),
    ],
)
def test_four_modules_of_hyper_parallel_305(schedule: str, units: int) -> None:
    assert run(schedule).duration_s == units


def draw_costs(plan: Plan, seed: int) -> tuple[list[Fraction], dict[OpId, Fraction]]:
    draw = random.Random(seed)
    compute = [Fraction(draw.randint(0, 30), draw.randint(1, 7)) for _ in plan.modules.modules]
    seconds = {step.op: Fraction(draw.randint(0, 40), draw.randint(1, 7)) for step in ops_of(plan)}
    return compute, seconds


def table(draw: random.Random) -> ModuleTable:
    axes = draw.choice([{Axis.SHARD: 2, Axis.REPLICATE: 2}, {Axis.SHARD: 4}, {Axis.REPLICATE: 4}])
    count = draw.randint(1, 9)
    modules = tuple(
        Module(name=f"m{n}", parameters=(Parameter(name="p", shape=(draw.choice([4, 6, 64]),)),), axes=axes)
        for n in range(count)
    )
    need = list(range(count))
    if draw.random() < 0.3:
        draw.shuffle(need)
    return ModuleTable(modules=modules, need_order=tuple(need))


def random_plan(seed: int) -> Plan:
    modules = table(random.Random(seed))
    return commplan.compile(mixtures.mixture(seed, [modules], ("fp32", "bf16")).text, modules)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_random_plans_end_with_their_longest_path(seed: int) -> None:
    plan = random_plan(seed)
    compute, seconds = draw_costs(plan, seed)
    ends, duration = longest_path.ends(plan, dict(enumerate(compute)), seconds)
    # Fractions go where floats do, and are exact.
    simulated = simulate(plan, Costs(compute, {op: OpCost(latency_s=s) for op, s in seconds.items()}))  # type: ignore[arg-type]
    assert {ran.op: ran.end_s for ran in simulated.ops} == ends
    assert simulated.duration_s == duration


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6))
def test_the_peak_is_what_the_plan_declares(seed: int) -> None:
    plan = random_plan(seed)
    compute, seconds = draw_costs(plan, seed)
    simulated = simulate(plan, Costs(compute, {op: OpCost(latency_s=s) for op, s in seconds.items()}))  # type: ignore[arg-type]
    declared = plan.bytes_by_step(*ONE_BACKWARD, backwards=Backwards.LAST)
    assert max(point.size_bytes for point in memory(simulated)) == max(declared)
    accumulated = memory(simulated, COMMUNICATION)
    assert max(point.size_bytes for point in accumulated) == max(plan.bytes_by_step(*COMMUNICATION, backwards=Backwards.LAST))
    times = [point.begin_s for point in memory(simulated)]
    assert times == sorted(times)
    assert memory(simulated)[-1].size_bytes == 0


@pytest.mark.parametrize("schedule", library.names())
def test_every_moment_of_a_lane_and_of_compute_is_told_once(schedule: str) -> None:
    simulated = run(schedule, 6)
    told = report(simulated)
    busy = sum(ran.end_s - ran.begin_s for ran in simulated.compute)
    applied = sum(ran.end_s - ran.begin_s for ran in simulated.ops if ran.lane == "compute")
    assert told.compute_wait_s() + busy + applied == simulated.duration_s
    for lane in told.lanes:
        assert told.hidden_s(lane) + told.exposed_s(lane) + told.idle_s(lane) == pytest.approx(simulated.duration_s)
    assert told.peak_bytes == max(simulated.plan.bytes_by_step(*ONE_BACKWARD, backwards=Backwards.LAST))
    if not simulated.plan.partial_sum_bytes:
        assert told.peak_bytes == told.declared_peak_bytes == simulated.plan.peak_bytes


def test_gathered_parameters_have_a_curve_of_their_own() -> None:
    simulated = run("prefetch_overlap")
    points = memory(simulated, [BufferKind.PARAMETER])
    assert max(point.size_bytes for point in points) == simulated.plan.peak_bytes_of(BufferKind.PARAMETER)
