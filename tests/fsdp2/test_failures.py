"""Ranks that run apart, collectives that never end, and backwards that raise: an error everywhere, never a wrong gradient."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commplan
from commplan.errors import CollectiveTimeoutError, DivergenceError, ExecutionError
from commplan.execute.lanes import Task
from commplan.execute.workers import Completion, WorkerLanes
from commplan.fsdp2 import Options, torch_private
from commplan.language import library
from commplan.ops import OpId
from tests.worlds import features, models, parity, reference
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]
TIMEOUT_S = 3.0
GENEROUS_S = 30.0

SOME = ("blocking", "pipelined_allreduce", "bucketed_pipeline_depth2", "fsdp2_native")


@contextmanager
def raising(kind: type[Exception]) -> Iterator[list[str]]:
    """The block ends in an error of `kind` in less than generous time; yields a list that gets its message."""
    said: list[str] = []
    begin_s = time.monotonic()
    with pytest.raises(kind) as caught:
        yield said
    said.append(str(caught.value))
    assert time.monotonic() - begin_s < GENEROUS_S


def uses_apart(here: Rank, uses: list[str], schedule: str) -> str:
    model = models.pair(here.mesh((2, 2)))
    x = FN.batch(here.rank, 0)
    with commplan.attach(model, schedule, options=Options(timeout_s=TIMEOUT_S)):
        model.uses = uses[here.rank]
        with raising(ExecutionError) as said:
            model(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        # The attachment is of no more use, and says so.
        with raising(ExecutionError) as again:
            model(x).sum().backward()
    assert "earlier backward failed" in again[0]
    model = models.pair(here.mesh((2, 2)))
    with commplan.attach(model, schedule, options=Options(timeout_s=60)):
        model(x).sum().backward()
        equal_uses(here, schedule)
    return said[0]


def equal_uses(here: Rank, schedule: str) -> None:
    """All ranks use a alone: no divergence, the right value, no gradient for c."""

    def backward(model: nn.Module, rank: int) -> None:
        model.uses = "a"
        model(FN.batch(rank, 0)).sum().backward()

    model = models.pair(here.mesh((2, 2)))
    with commplan.attach(model, schedule, options=Options(timeout_s=60)):
        backward(model, here.rank)
        reference.assert_close(model, reference.gradients(models.Pair, here.size, backward), 1e-5)


@pytest.mark.report("pytorch#75902", "pytorch#75373")
@pytest.mark.parametrize("schedule", SOME)
def test_equal_shapes_of_different_parameters(worlds: Worlds, schedule: str) -> None:
    """The collectives would fit, and mix the gradients of a and c."""
    for message in worlds.of(4).run(uses_apart, uses=["a", "a", "c", "c"], schedule=schedule):
        assert re.search(r"rank\(s\) 2, 3 have .*parameters \(2, 3\).* rank\(s\) 0, 1 have .*parameters \(0, 1\)", message)
        assert "not to be used" in message


@pytest.mark.xfail(reason="ranks are compared beside the collectives", strict=True, raises=AssertionError)
def test_different_sets_in_one_shard_group(worlds: Worlds) -> None:
    """Sizes differ here, on which gloo ends the process: the ranks have to find out before."""
    with worlds.thrown_away(4) as world:
        for message in world.run(uses_apart, uses=["a", "ac", "a", "ac"], schedule="pipelined_allreduce"):
            assert "rank" in message


def zero_filled(here: Rank) -> None:
    """When asked for, unused parameters count as zero."""
    uses = ["a", "ac", "a", "ac"]

    def backward(model: nn.Module, rank: int) -> None:
        model.uses = uses[rank]
        model(FN.batch(rank, 0)).sum().backward()

    model = models.pair(here.mesh((2, 2)))
    model.set_reduce_scatter_unused_params(True)
    with commplan.attach(model, "pipelined_allreduce", options=Options(timeout_s=60)):
        backward(model, here.rank)
        reference.assert_close(model, reference.gradients(models.Pair, here.size, backward), 1e-5)


@features.reduced_unused_params
@pytest.mark.report("pytorch#158719", "pytorch#170667", "torchtitan#2747")
def test_zero_filled_means(worlds: Worlds) -> None:
    worlds.of(4).run(zero_filled)


def skips_a_backward(here: Rank) -> str:
    """Rank 3 runs no backward; parameters stay gathered, so that only commplan's collectives can miss it."""
    model = parity.build(FN, here, (2, 2), {"reshard": False})
    attachment = commplan.attach(model, "pipelined_allreduce", options=Options(timeout_s=TIMEOUT_S))
    loss = FN.loss(model(FN.batch(here.rank, 0)), here.rank)
    said = [""]
    if here.rank != 3:
        with raising(CollectiveTimeoutError if here.rank == 2 else ExecutionError) as said:
            loss.backward()
    # The groups of rank 3 have to last until the others gave up.
    dist.barrier()
    attachment.detach()
    return said[0]


def test_a_rank_that_skips_a_backward(worlds: Worlds) -> None:
    messages = worlds.of(4).run(skips_a_backward)
    assert re.search(r"RS_\d of module '[^']+' on the group of ranks \[2, 3\] did not end within", messages[2])
    for message in messages[:3]:
        assert re.search(r"did not end|failed", message)


class Blocked(WorkerLanes):
    """The all-reduce of module 3, the first piece of it, does not start until the case is over."""

    def __init__(self, timeout_s: float, over: threading.Event) -> None:
        super().__init__(timeout_s)
        self._over = over

    def submit(self, lane: str, task: Task, waits: Any) -> Completion:
        if task.op.startswith("AR") and 3 in (op := OpId.parse(task.op)).members and op.piece == 0:
            task = replace(task, start=self._block)
        return super().submit(lane, task, waits)

    def _block(self) -> None:
        self._over.wait()
        raise InterruptedError


def never_completes(here: Rank, schedule: str) -> tuple[str, float]:
    """Parameters stay gathered, so that only commplan's collectives run in backward."""
    model = models.shard(models.fk(6), here.mesh((2, 2)), reshard=False)
    over = threading.Event()
    blocked = {"make_lanes": lambda device, timeout_s: Blocked(timeout_s, over)} if here.rank == 1 else {}
    with commplan.attach(model, schedule, options=Options(timeout_s=TIMEOUT_S, **blocked)):
        out = ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum()
        begin_s = time.monotonic()
        message = ""
        try:
            out.backward()
        except ExecutionError as error:
            message = str(error)
            with raising(ExecutionError) as again:
                model(torch.zeros(1, requires_grad=True))
            assert "earlier backward failed" in again[0]
        else:
            assert reference.values(model) == [k * 2.5 for k in range(1, 7)]
        elapsed_s = time.monotonic() - begin_s
        # Groups have to last until all gave up.
        dist.barrier()
    # The thread is left behind by the schedule, and would be found by cases that come after.
    over.set()
    for _, state in torch_private.states(model):
        for owner in (state, *torch_private.groups(state)):
            assert not [name for name, value in vars(owner).items() if callable(value) and hasattr(type(owner), name)]
    return message, elapsed_s


@pytest.mark.report("OLMo-core#829")
@pytest.mark.parametrize("schedule", library.names())
def test_a_collective_that_never_completes(worlds: Worlds, schedule: str) -> None:
    found = worlds.of(4).run(never_completes, schedule=schedule)
    # Ranks 1 and 3 share the replicate group of the op that is stuck; the others may have all that they need.
    for message, elapsed_s in (found[1], found[3]):
        # Whoever notices first says that it did not end, or what gloo said; the other one may hear of that.
        stuck = r"AR_[^ ]+ of module '([^']+, )?2(, [^']+)?' on the group of ranks \[1, 3\] (did not end|can't end|failed)"
        assert re.search(stuck, message), message
        assert TIMEOUT_S * 0.9 <= elapsed_s < GENEROUS_S


# Exceptions in backward.


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("boom")


def after_an_exception(here: Rank, in_microbatch: int) -> None:
    """Block 1 raises at step 0; the next steps are right, whatever had been accumulated."""
    for schedule, params in parity.DISTINCT:
        model = models.shard(models.fk(3), here.mesh((2, 2)))
        block = model[1]  # type: ignore[index]
        original = block.forward
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for i in range(in_microbatch + 1):
                parity.set_flags(model, {"all_reduce": False})
                if i == in_microbatch:
                    block.forward = lambda x, original=original: original(Explode.apply(x))
                loss = ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum()
                if i < in_microbatch:
                    loss.backward()
                else:
                    with pytest.raises(ArithmeticError, match="boom"):
                        loss.backward()
            block.forward = original
            for _ in range(2):
                model.zero_grad()
                parity.set_flags(model, {})
                ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
                assert reference.values(model) == [2.5, 5.0, 7.5], schedule


@pytest.mark.report("composer#3866", "torchtitan#1329")
@pytest.mark.parametrize("in_microbatch", [0, 1])
def test_a_clean_step_after_an_exception(worlds: Worlds, in_microbatch: int) -> None:
    worlds.of(4).run(after_an_exception, in_microbatch=in_microbatch)


class Raises(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("before any module")


class Head(nn.Module):
    """FK(3) in a root without parameters, whose backward can raise before it comes to a block."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(models.fk(3))
        self.raises = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = block(x)
        return Raises.apply(x) if self.raises else x


def raises_early(here: Rank, detaches: bool) -> list[float]:
    # Without a gradient of the input, FSDP2 reduces the first block in its final callback.
    model = models.shard(Head(), here.mesh((2, 2)))
    attachment = commplan.attach(model, "pipelined_allreduce")
    with pytest.raises(ValueError, match="before any module"):
        model(torch.zeros(1)).sum().backward()
    if detaches:
        attachment.detach()
    model.zero_grad()
    model.raises = False
    ((here.rank + 1) * model(torch.zeros(1))).sum().backward()
    attachment.detach()
    return reference.values(model)


@pytest.mark.parametrize("detaches", [False, True])
def test_a_backward_that_raises_before_any_module(worlds: Worlds, detaches: bool) -> None:
    """FSDP2 keeps its final callback for queued then, and would never finish a backward again."""
    assert worlds.of(4).run(raises_early, detaches=detaches) == [[2.5, 5.0, 7.5]] * 4


def order_apart(here: Rank) -> str:
    model = parity.build(FN, here, (2, 2), {"reshard": False})
    model.path = (2, 1, 0) if here.rank == 1 else (1, 0, 2)
    with commplan.attach(model, "pipelined_allreduce", options=Options(timeout_s=TIMEOUT_S)):
        # FSDP2 gathers in the order of forward, which it needs alike on all ranks.
        for module in (model, *model.b):  # type: ignore[misc]
            module.unshard()
        with raising(DivergenceError) as said:
            FN.loss(model(FN.batch(here.rank, 0).requires_grad_()), here.rank).backward()
        dist.barrier()
    return said[0]


def test_ranks_that_find_different_orders(worlds: Worlds) -> None:
    for message in worlds.of(4).run(order_apart):
        assert "rank(s) 1 have" in message
        assert "module order" in message


def second_order(here: Rank) -> dict[str, str]:
    said = {}
    for schedule, params in parity.LIBRARY:
        model = parity.build(FN, here, (2, 2), {})
        with commplan.attach(model, schedule, **params):
            loss = FN.loss(model(FN.batch(here.rank, 0).requires_grad_()), here.rank)
            with pytest.raises(Exception, match="create_graph") as caught:
                loss.backward(create_graph=True)
        said[schedule] = str(caught.value)
    return said


@pytest.mark.report("pytorch#172543")
def test_create_graph_is_refused(worlds: Worlds) -> None:
    for of_rank in worlds.of(4).run(second_order):
        for schedule, message in of_rank.items():
            assert "create_graph=True is not supported" in message, schedule
