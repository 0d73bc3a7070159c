"""When the lanes of an FSDP2 model get what was issued: before compute begins, and before the host waits for anything else."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import commplan
from commplan.execute import rhythm
from commplan.execute.lanes import Task
from commplan.execute.workers import Completion, WorkerLanes
from commplan.fsdp2 import torch_faults
from tests.worlds import models, reference
from tests.worlds.world import Rank, Worlds

NUM_BLOCKS = 5
NUM_BACKWARDS = 3
ALWAYS_SHORT_S, NEVER_SHORT_S = 60.0, 0.0


@dataclass
class Seen:
    """What one backward did.

    Attributes:
        withheld: ops that lanes did not get as they were issued.
        left: ops that they had not got either when `compute` of a module began, or the host began to `wait` for an all-gather.
        num_waits: of the host for all-gathers.
    """

    withheld: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=lambda: {"compute": [], "wait": []})
    num_waits: int = 0
    gradients: Sequence[float | None] = ()


class Watched(WorkerLanes):
    """Knows what it holds back."""

    seen = Seen()

    def submit(self, lane: str, task: Task, waits: Any) -> Completion:
        token = super().submit(lane, task, waits)
        if task.op in self.held_back():
            self.seen.withheld.append(task.op)
        return token

    def held_back(self) -> list[str]:
        return [queued.task.op for queued in self._held_back]


class Begins(torch.autograd.Function):
    """Compute of backward begins, and lasts until lanes are idle: what is issued next does not queue behind anything."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lanes: list[Watched]) -> torch.Tensor:
        ctx.lanes = lanes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        for lanes in ctx.lanes:
            lanes.seen.left["compute"] += lanes.held_back()
            lanes.drain()
        return grad, None


class Block(models.Scaled):
    def __init__(self, k: int, lanes: list[Watched]) -> None:
        super().__init__(k)
        self.lanes = lanes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Begins.apply(super().forward(x), self.lanes)


class Unfinished:
    """An all-gather that has always something left to wait for."""

    def __init__(self, work: Any, lanes: Watched) -> None:
        self._work = work
        self._lanes = lanes

    def is_completed(self) -> bool:
        return False

    def wait(self, *timeout: Any) -> None:
        seen = self._lanes.seen
        seen.num_waits += 1
        seen.left["wait"] += self._lanes.held_back()
        self._work.wait(*timeout)


def backwards(here: Rank, schedule: str, short_s: float, waits: bool = False, skips: bool = False) -> list[Seen]:
    """Some backwards in turn. `skips`: in the last one the block that runs first in backward is followed by no other."""
    made: list[Watched] = []
    blocks = [Block(k, made) for k in range(1, NUM_BLOCKS + 1)]
    model: Any = models.shard(nn.Sequential(*blocks), here.mesh((2, 2)))

    def make_lanes(device: torch.device, timeout_s: float) -> Watched:
        made.append(Watched(timeout_s))
        return made[-1]

    call = torch_faults._WatchedAllGather.__call__

    def unfinished(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = self._original
        with patch.object(self, "_original", lambda **asked: Unfinished(original(**asked), made[-1])):
            return call(self, *args, **kwargs)

    found = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(rhythm, "SHORT_S", short_s))
        stack.enter_context(commplan.attach(model, schedule, options=commplan.Options(timeout_s=60, make_lanes=make_lanes)))
        if waits:
            stack.enter_context(patch.object(torch_faults._WatchedAllGather, "__call__", unfinished))
        for number in range(NUM_BACKWARDS):
            runs = model[-1:] if skips and number == NUM_BACKWARDS - 1 else model
            out = ((here.rank + 1) * runs(torch.zeros(1, requires_grad=True))).sum()
            made[-1].seen = Seen()
            out.backward()
            made[-1].seen.gradients = reference.values(model)
            found.append(made[-1].seen)
            model.zero_grad()
    return found


ALL = [2.5 * k for k in range(1, NUM_BLOCKS + 1)]


@pytest.mark.parametrize("schedule", ["overlapped_allreduce", "prefetch_overlap"])
def test_small_modules_are_handed_over_as_compute_begins(worlds: Worlds, schedule: str) -> None:
    for first, *later in worlds.of(4).run(backwards, schedule=schedule, short_s=ALWAYS_SHORT_S):
        assert first.withheld == []
        for seen in later:
            # Nothing follows the last one.
            assert [op for op in seen.withheld if op.startswith("RS")] == [f"RS_{n}" for n in range(NUM_BLOCKS - 1)]
            assert seen.left == {"compute": [], "wait": []}
        assert [seen.gradients for seen in (first, *later)] == [ALL] * NUM_BACKWARDS


@pytest.mark.parametrize("schedule", ["overlapped_allreduce", "prefetch_overlap"])
def test_large_modules_are_handed_over_at_once(worlds: Worlds, schedule: str) -> None:
    for of_rank in worlds.of(4).run(backwards, schedule=schedule, short_s=NEVER_SHORT_S):
        assert all(seen.withheld == [] for seen in of_rank)


def test_nothing_is_held_back_while_the_host_waits_for_an_all_gather(worlds: Worlds) -> None:
    for of_rank in worlds.of(4).run(backwards, schedule="overlapped_allreduce", short_s=ALWAYS_SHORT_S, waits=True):
        for seen in of_rank[1:]:
            assert len(seen.withheld) == NUM_BLOCKS - 1
            assert seen.num_waits >= NUM_BLOCKS - 1
            assert seen.left == {"compute": [], "wait": []}


def test_a_module_that_is_followed_by_none_this_time(worlds: Worlds) -> None:
    """What it issued was held back in vain, and is over when backward is; nothing else is held back."""
    for of_rank in worlds.of(4).run(backwards, schedule="overlapped_allreduce", short_s=ALWAYS_SHORT_S, skips=True):
        assert of_rank[-1].withheld == ["RS_0"]
        assert of_rank[-1].gradients == [None] * (NUM_BLOCKS - 1) + ALL[-1:]


class Breaks(torch.autograd.Function):
    """A backward raises, when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, breaks: list[bool]) -> torch.Tensor:
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.breaks:
            raise ArithmeticError
        return grad, None


def raises(here: Rank) -> tuple[bool, bool]:
    """Whether the op that was issued last has begun all the same, and whether the model goes when it is dropped."""
    made: list[Watched] = []
    breaks: list[bool] = []
    model: Any = models.shard(nn.Sequential(*(Block(k, made) for k in range(3))), here.mesh((2, 2)), reshard=False)
    # Between the hook after compute of the second block, and that before compute of the first.
    model[0].register_forward_hook(lambda module, args, out: Breaks.apply(out, breaks))

    def make_lanes(device: torch.device, timeout_s: float) -> Watched:
        made.append(Watched(timeout_s))
        return made[-1]

    with patch.object(rhythm, "SHORT_S", ALWAYS_SHORT_S):
        attachment = commplan.attach(
            model, "overlapped_allreduce", options=commplan.Options(timeout_s=60, make_lanes=make_lanes)
        )
        for _ in range(2):
            model(torch.zeros(1, requires_grad=True)).sum().backward()
        breaks.append(True)
        made[-1].seen = Seen()
        with suppress(ArithmeticError):
            model(torch.zeros(1, requires_grad=True)).sum().backward()
    assert "RS_1" in made[-1].seen.withheld
    begins = made[-1].held_back() == []
    executor = weakref.ref(attachment._driver.executor)
    made.clear()
    del attachment, model
    deadline_s = time.monotonic() + 30
    while executor() is not None and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
    return begins, executor() is None


def test_a_backward_that_raises_leaves_nothing_held_back(worlds: Worlds) -> None:
    """Other ranks may be waiting for it; and what lanes hold keeps a model alive."""
    assert worlds.of(4).run(raises) == [(True, True)] * 4
