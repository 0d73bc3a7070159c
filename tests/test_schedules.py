"""The schedules that users start from keep what their summaries promise: brevity, time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import commplan
from commplan.language import library
from commplan.ops import Kind, OpId, Section
from commplan.plan import BufferKind, OpStep, Plan

DURATION = {Kind.ALL_GATHER: 0, Kind.REDUCE_SCATTER: 4, Kind.ALL_REDUCE: 8, Kind.APPLY: 0}
COMPUTE = 10

WAITED_ALL_REDUCE = """\
version: 1
name: waited_all_reduce
post_backward:
  - RS_n:     {after: compute_n}
  - AR_<n-1>: {after: RS_<n-1>}
  - wait: AR_<n-1>
root:
  - apply_n:  {after: AR_n}
"""


def run_time(plan: Plan) -> int:
    """When backward ends if ops take `DURATION` and nothing contends: the rules of when an op starts, word by word."""
    now = 0
    ends: dict[OpId, int] = {}
    free: dict[tuple[str, str], int] = {}
    for hook in plan.hooks:
        if hook.section is Section.POST_BACKWARD:
            now += COMPUTE
        for step in hook.steps:
            ready = max([now, *(ends.get(op, 0) for op in step.after)])
            if not isinstance(step, OpStep) or step.lane == "compute":
                now = ready
                if isinstance(step, OpStep):
                    ends[step.op] = ready
                continue
            queues = [("lane", step.lane), ("communicator", step.communicator)]
            end = max([ready, *(free.get(queue, 0) for queue in queues)]) + DURATION[step.kind]
            ends[step.op] = end
            free |= dict.fromkeys(queues, end)
    return max(now, *free.values())


@pytest.mark.parametrize("name", library.names())
def test_a_schedule_is_short_and_explains_itself(name: str) -> None:
    path = library.find(name)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 25
    spec = commplan.language.load(path)
    assert spec.name == name == Path(path).stem
    assert len(spec.summary.split()) >= 10


@pytest.mark.parametrize(
    ("schedule", "total"),
    [
        ("blocking", 88),
        (WAITED_ALL_REDUCE, 72),
        ("pipelined_allreduce", 56),
        ("overlapped_allreduce", 52),
        ("fsdp2_native", 52),
        ("windowed_allreduce", 52),
    ],
)
def test_time_of_four_modules(schedule: str, total: int) -> None:
    """The four ways to place an all-reduce that hyper-parallel#305 tells apart, with their right times."""
    assert run_time(commplan.compile(schedule, 4)) == total


def test_a_delay_of_one_is_the_pipeline_and_each_further_one_costs_an_all_reduce() -> None:
    times = [run_time(commplan.compile("delayed_allreduce", 8, k=k)) for k in (1, 2, 3)]
    assert times[0] == run_time(commplan.compile("pipelined_allreduce", 8))
    assert times == [times[0], times[0] + 8, times[0] + 16]


@pytest.mark.parametrize("num_modules", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("schedule", "params", "num_shards"),
    [
        ("blocking", {}, 1),
        ("bucketed_pipeline_depth2", {}, 2),
        ("eager_apply", {}, 2),
        ("windowed_allreduce", {"k": 1}, 1),
        ("windowed_allreduce", {}, 3),
        ("windowed_allreduce", {"k": 32}, 32),
        ("overlapped_allreduce", {}, 32),
    ],
)
def test_reduced_shards_alive_at_once(schedule: str, params: dict[str, int], num_shards: int, num_modules: int) -> None:
    plan = commplan.compile(schedule, num_modules, **params)
    shard_bytes = plan.modules.modules[0].shard_bytes
    assert plan.peak_bytes_of(BufferKind.SHARD) == min(num_shards, num_modules) * shard_bytes


INPUTS_AT_ONCE = {"reduce_interval": 2.0, "low_precision_reduce_scatter": 0.5}
"""Where that is not one module's whole gradients, in fp32."""


@pytest.mark.parametrize("name", library.names())
def test_reduce_scatter_inputs_at_a_time(name: str) -> None:
    plan = commplan.compile(name, 6)
    assert plan.peak_bytes_of(BufferKind.RS_INPUT) == INPUTS_AT_ONCE.get(name, 1.0) * plan.modules.modules[0].reduced_bytes


def test_the_pipeline_of_depth_two_has_one_op_of_a_kind_in_flight() -> None:
    in_flight: set[OpId] = set()
    for step in commplan.compile("bucketed_pipeline_depth2", 6).steps:
        if isinstance(step, OpStep) and step.lane != "compute":
            in_flight.add(step.op)
            assert len({op.family for op in in_flight}) == len(in_flight)
        else:
            in_flight.difference_update(step.after)
