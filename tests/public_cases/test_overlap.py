"""What keeps gradients right must not take the overlap away: an all-reduce is in flight when a later module computes.

Told by order: the all-reduce ends only after a later module has begun, and that module waits until the all-reduce has.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import commplan
from commplan.execute.lanes import Task
from commplan.execute.workers import Completion, WorkerLanes
from commplan.fsdp2 import Options
from commplan.ops import OpId
from tests.worlds import models, parity, reference
from tests.worlds.world import Rank, Worlds

PATIENCE_S = 60.0
NONE_IN_FLIGHT = ("blocking", "deferred_allreduce")


@dataclass
class Gate:
    """Of one backward: whether compute of a later module began while the all-reduce was in flight."""

    patience_s: float
    is_issued: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)
    was_met: threading.Event = field(default_factory=threading.Event)

    def compute(self) -> None:
        """Compute of a module begins."""
        if self.is_issued.is_set() and not self.has_ended.is_set():
            self.has_begun.wait(self.patience_s)
            self.was_met.set()


class Gated(WorkerLanes):
    """Holds one all-reduce open until it was met, or patience ends."""

    def __init__(self, timeout_s: float, gate: Gate) -> None:
        super().__init__(timeout_s)
        self._overlap = gate

    def submit(self, lane: str, task: Task, waits: Any) -> Completion:
        # The one of module 0, in a bucket or not; the first piece of it.
        if not task.op.startswith("AR") or (op := OpId.parse(task.op)).first != 0 or op.piece != 0:
            return super().submit(lane, task, waits)
        gate = self._overlap

        def start() -> Any:
            gate.has_begun.set()
            return task.start()

        def finish() -> None:
            gate.was_met.wait(gate.patience_s)
            task.finish()
            gate.has_ended.set()

        gate.is_issued.set()
        return super().submit(lane, replace(task, start=start, finish=finish), waits)


class Begins(torch.autograd.Function):
    """Tells the gate that backward of a module begins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.gate = gate
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.gate.compute()
        return grad, None


class Block(models.Scaled):
    def __init__(self, k: int, gate: Gate) -> None:
        super().__init__(k)
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Begins.apply(super().forward(x), self.gate)


def met(here: Rank, schedule: str, params: dict[str, int], patience_s: float) -> bool:
    gate = Gate(patience_s)
    model = models.shard(nn.Sequential(*(Block(k, gate) for k in range(1, 7))), here.mesh((2, 2)))
    options = Options(timeout_s=2 * PATIENCE_S, make_lanes=lambda device, timeout_s: Gated(timeout_s, gate))
    with commplan.attach(model, schedule, options=options, **params):
        ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
    assert reference.values(model) == [2.5 * k for k in range(1, 7)]
    return gate.was_met.is_set()


@pytest.mark.report("DeepSpeed#7804")
@pytest.mark.parametrize(("schedule", "params"), [s for s in parity.SCHEDULES if s[0] not in NONE_IN_FLIGHT])
def test_gradients_are_right_and_an_all_reduce_is_in_flight(worlds: Worlds, schedule: str, params: dict[str, int]) -> None:
    assert worlds.of(4).run(met, schedule=schedule, params=params, patience_s=PATIENCE_S) == [True] * 4


@pytest.mark.parametrize("schedule", NONE_IN_FLIGHT)
def test_none_in_flight(worlds: Worlds, schedule: str) -> None:
    assert worlds.of(4).run(met, schedule=schedule, params={}, patience_s=0.1) == [False] * 4
