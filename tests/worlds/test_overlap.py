"""Schedules that should overlap do: an all-reduce is in flight while a later module computes. Told from order, not duration."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import commplan
from commplan.execute.lanes import Task
from commplan.execute.workers import Completion, WorkerLanes
from commplan.fsdp2 import Options
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

COMPUTE_S = 0.04
COLLECTIVE_S = 0.06


class Paced(WorkerLanes):
    """Each collective takes a while, as on a slow network."""

    def submit(self, lane: str, task: Task, waits: Any) -> Completion:
        def finish() -> None:
            time.sleep(COLLECTIVE_S)
            task.finish()

        return super().submit(lane, replace(task, finish=finish) if task.is_communication else task, waits)


class Slow(torch.autograd.Function):
    """Compute of a backward, by sleeping; `spans` gets when it ran."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spans: list[tuple[float, float]]) -> torch.Tensor:
        ctx.spans = spans
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        begin_s = time.perf_counter()
        time.sleep(COMPUTE_S)
        ctx.spans.append((begin_s, time.perf_counter()))
        return grad, None


class SlowBlock(models.Scaled):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.spans: list[tuple[float, float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(super().forward(x), self.spans)


def in_flight(here: Rank, schedule: str) -> dict[str, int]:
    """How many collectives of each family were running when some later module's compute began."""
    blocks = [SlowBlock(k) for k in range(1, 7)]
    model = models.shard(torch.nn.Sequential(*blocks), here.mesh((2, 2)))
    with commplan.attach(
        model, schedule, options=Options(timeout_s=60, make_lanes=lambda device, timeout_s: Paced(timeout_s))
    ) as attachment:
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        report = attachment.last_backward
    assert report is not None
    begins = [block.spans[0][0] for block in blocks]
    found = {"RS": 0, "AR": 0}
    for op in report.ops:
        found[op.op.split("_")[0]] += any(op.begin_s < begin_s < op.end_s for begin_s in begins)
    assert sum(report.hidden_s(lane) for lane in ("shard", "replicate", "comm")) >= 0
    return found


@pytest.mark.report("DeepSpeed#7804")
@pytest.mark.parametrize("schedule", ["pipelined_allreduce", "overlapped_allreduce", "fsdp2_native", "windowed_allreduce"])
def test_an_all_reduce_is_in_flight_when_the_next_compute_begins(worlds: Worlds, schedule: str) -> None:
    for found in worlds.of(4).run(in_flight, schedule=schedule):
        assert found["AR"] >= 1


def test_blocking_leaves_nothing_in_flight(worlds: Worlds) -> None:
    assert worlds.of(4).run(in_flight, schedule="blocking") == [{"RS": 0, "AR": 0}] * 4
