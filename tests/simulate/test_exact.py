"""Simulated times, where nothing slows anything else: exact, on known cases and on random plans."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import commplan
from commplan.language import library
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis, Kind, OpId
from commplan.plan.model import COMMUNICATION, Backwards, BufferKind, OpStep, Plan
from commplan.sight.figures import describe_backward
from commplan.simulate import Costs, OpCost, Simulated, limits, memory, report, simulate
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
ROOT = "root:\n  - apply_n: {after: AR_n}\n"
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
    frozen = {n for n in range(count) if draw.random() < 0.2} - {draw.randrange(count)}
    modules = tuple(
        Module(
            name=f"m{n}",
            parameters=(Parameter(name="p", shape=(draw.choice([4, 6, 64]),), requires_grad=n not in frozen),),
            axes=axes,
        )
        for n in range(count)
    )
    need = list(range(count))
    if draw.random() < 0.3:
        draw.shuffle(need)
    return ModuleTable(modules=modules, need_order=tuple(need))


def random_plan(seed: int, *, accumulates: bool = True) -> Plan:
    modules = table(random.Random(seed))
    text = mixtures.mixture(seed, [modules], ("fp32", "bf16")).text
    return commplan.compile(text if accumulates else text.replace(", when: last_backward", ""), modules)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_random_plans_end_with_their_longest_path(seed: int) -> None:
    plan = random_plan(seed)
    compute, seconds = draw_costs(plan, seed)
    gather = [Fraction(random.Random(-seed - n).randint(0, 20), 3) for n in range(len(compute))]
    ends, duration = longest_path.ends(plan, {n: gather[n] + compute[n] for n in range(len(compute))}, seconds)
    # Fractions go where floats do, and are exact.
    ops = {op: OpCost(latency_s=s) for op, s in seconds.items()}  # type: ignore[arg-type]
    simulated = simulate(plan, Costs(compute, ops, gather_s=gather))  # type: ignore[arg-type]
    assert {ran.op: ran.end_s for ran in simulated.ops} == ends
    assert simulated.duration_s == duration


def alive_bytes(simulated: Simulated, plan: Plan, at_s: Fraction) -> int:
    """What is there at a moment at which nothing happens, buffer by buffer."""
    reached, over = simulated.reached_s, simulated.over_s
    return sum(b.size_bytes for b in plan.buffers if b.kind in COMMUNICATION and reached[b.born] <= at_s < over[b.freed])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6))
def test_memory_holds_what_is_alive_and_its_most_is_what_the_plan_declares(seed: int) -> None:
    plan = random_plan(seed, accumulates=False)
    compute, seconds = draw_costs(plan, seed)
    simulated = simulate(plan, Costs(compute, {op: OpCost(latency_s=s) for op, s in seconds.items()}))  # type: ignore[arg-type]
    points = memory(simulated)
    assert max(point.size_bytes for point in points) == plan.peak_bytes
    assert [point.begin_s for point in points] == sorted(point.begin_s for point in points)
    assert points[-1].size_bytes == 0
    for now, then in pairwise(points):
        if now.begin_s < then.begin_s:
            inside = (Fraction(now.begin_s) + Fraction(then.begin_s)) / 2
            assert now.size_bytes == alive_bytes(simulated, plan, inside)


LATE = {"RS": ("RS", "AR"), "AR": ("AR",)}


@pytest.mark.parametrize("skipped", LATE.values(), ids=LATE)
def test_a_step_of_one_backward_leaves_nothing_to_later_ones(skipped: tuple[str, ...]) -> None:
    before = {"RS": "compute", "AR": "RS"}
    late = {kind: ", when: last_backward" if kind in skipped else "" for kind in before}
    texts = [
        HEAD + "".join(f"  - {kind}_n: {{after: {before[kind]}_n{when[kind]}}}\n" for kind in before) + ROOT
        for when in (dict.fromkeys(before, ""), late)
    ]
    always, last = (memory(run(text, 6)) for text in texts)
    assert always == last


@pytest.mark.parametrize("schedule", library.names())
def test_every_moment_of_a_lane_and_of_compute_is_told_once(schedule: str) -> None:
    simulated = run(schedule, 6)
    told = report(simulated)
    busy = sum(ran.end_s - ran.begin_s for ran in simulated.compute)
    applied = sum(ran.end_s - ran.begin_s for ran in simulated.ops if ran.lane == "compute")
    assert told.compute_wait_s() + busy + applied == simulated.duration_s
    for lane in told.lanes:
        assert told.hidden_s(lane) + told.exposed_s(lane) + told.idle_s(lane) == pytest.approx(simulated.duration_s)
    if all(buffer.backwards is Backwards.EVERY for buffer in simulated.plan.buffers):
        assert told.peak_bytes == told.declared_peak_bytes == simulated.plan.peak_bytes


def test_while_fsdp2_gathers_compute_stands_still() -> None:
    plan = commplan.compile("overlapped_allreduce", 3)
    ops = {step.op: OpCost(latency_s=BY_KIND[step.kind]) for step in ops_of(plan)}
    # A link slows what computes, and nothing computes while parameters are gathered.
    costs = Costs([10] * 3, {op: replace(cost, link="net") for op, cost in ops.items()}, slowdown={"net": 1}, gather_s=[2] * 3)
    simulated = simulate(plan, costs)
    told = report(simulated)
    waits = [(wait.op, wait.begin_s, wait.end_s) for wait in told.compute_waits]
    assert waits[0] == ("FSDP2's all-gather of module 'module_0'", 0, 2)
    assert waits[1] == ("FSDP2's all-gather of module 'module_1'", 12, 14)
    assert [ran.begin_s for ran in simulated.compute if ran.module >= 0][:2] == [2, 14]
    # RS_0 runs from 12 to 16, and compute goes on at 14; so it is with RS_1, and behind RS_2 nothing is left.
    assert told.exposed_s("shard") == 2 + 2 + 4
    (of_first, *_) = describe_backward(told).ops
    assert (of_first.op, of_first.exposed_s) == ("RS_0", 2)
    assert of_first.reasons == ("compute waited for FSDP2's all-gather of module 'module_1', not for it",)


def test_gathered_parameters_have_a_curve_of_their_own() -> None:
    simulated = run("prefetch_overlap")
    points = memory(simulated, [BufferKind.PARAMETER])
    assert max(point.size_bytes for point in points) == simulated.plan.peak_bytes_of(BufferKind.PARAMETER)


def test_modules_that_no_gradient_needs_cost_nothing_and_hide_nothing() -> None:
    axes = {Axis.SHARD: 2, Axis.REPLICATE: 2}
    modules = tuple(
        Module(name=f"m{n}", parameters=(Parameter(name="p", shape=(4,), requires_grad=n < 3),), axes=axes) for n in range(4)
    )
    plan = commplan.compile("overlapped_allreduce", ModuleTable(modules=modules))
    ops = {step.op: OpCost(latency_s=BY_KIND[step.kind]) for step in ops_of(plan)}
    assert simulate(plan, Costs([10] * 4, ops)).duration_s == 42


def told_of(simulated: Simulated, op: str) -> tuple[float, str]:
    """When an op was issued, and what it could not begin before."""
    of = zip(simulated.ops, limits(simulated), strict=True)
    return next((ran.issued_s, limit) for ran, limit in of if str(ran.op) == op)


def test_what_an_op_could_not_begin_before() -> None:
    simulated = run("overlapped_allreduce", 2)
    assert told_of(simulated, "RS_0") == (10, "it was issued")
    assert told_of(simulated, "AR_0") == (10, "RS_0, which it waits for")
    assert told_of(simulated, "AR_1") == (20, "RS_1, which it waits for")
    assert told_of(simulated, "apply_0")[0] == 24
    assert told_of(simulated, "apply_1") == (24, "AR_1, which it waits for")


def test_an_apply_on_a_lane_is_no_collective() -> None:
    lines = "  - RS_n: {after: compute_n}\n  - AR_n: {after: RS_n}\nroot:\n  - apply_n: {after: AR_n, lane: mine}\n"
    simulated = run(HEAD.replace("post_backward", "lanes: {mine: {}}\npost_backward") + lines, 3)
    assert report(simulated).lanes == ("shard", "replicate")
