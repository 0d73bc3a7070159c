"""Simulated backwards as text."""

from __future__ import annotations

import pytest

import commplan
from commplan.language import library
from commplan.ops import Kind
from commplan.plan.model import OpStep
from commplan.simulate import Costs, OpCost, Simulated, draw, simulate

SECONDS = {Kind.ALL_GATHER: 2, Kind.REDUCE_SCATTER: 4, Kind.ALL_REDUCE: 8, Kind.APPLY: 0}


def run(schedule: str, num_modules: int) -> Simulated:
    plan = commplan.compile(schedule, num_modules)
    ops = {step.op: OpCost(latency_s=SECONDS[step.kind]) for step in plan.steps if isinstance(step, OpStep)}
    return simulate(plan, Costs([10] * num_modules, ops))


def test_one_character_a_unit() -> None:
    name, compute, shard, replicate, *_ = draw([run("overlapped_allreduce", 3)], 42 + len("replicate  "))
    assert name == "overlapped_allreduce: 42000.0 ms"
    assert compute == "compute    000000000011111111112222222222"
    assert shard == "shard      ..........0000......1111......2222........"
    assert replicate == "replicate  ..............00000000..11111111..22222222"


def test_all_to_one_scale() -> None:
    lines = list(draw([run("overlapped_allreduce", 4), run("blocking", 4)], 99))
    rows = {line.split(":")[0] if ":" in line else line.split(" ")[0]: line for line in reversed(lines) if line}
    assert len(rows["replicate"]) == round(52 / 88 * 88) + 11
    assert max(map(len, lines)) <= 99
    assert len(lines[lines.index("blocking: 88000.0 ms") + 3]) == 99


def test_all_gathers_are_letters() -> None:
    lines = list(draw([run("prefetch_overlap", 3)], 80))
    assert {"a", "b", "c", "0", "1", "2"} <= set(lines[2].removeprefix("shard"))


@pytest.mark.parametrize("schedule", library.names())
@pytest.mark.parametrize("columns", [20, 80, 200])
def test_lines_keep_their_width(schedule: str, columns: int) -> None:
    assert all(len(line) <= columns for line in draw([run(schedule, 12)], columns))


def test_a_lane_may_have_a_long_name() -> None:
    text = (
        "version: 1\nname: x\nsummary: x\nlanes: {a_lane_with_a_long_name: {}}\npost_backward:\n"
        "  - RS_n: {after: compute_n, lane: a_lane_with_a_long_name}\n  - AR_n: {after: RS_n}\nroot: [apply_n: {after: AR_n}]\n"
    )
    assert all(len(line) <= 24 for line in draw([run(text, 3)], 24))
