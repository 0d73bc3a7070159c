"""Under a schedule modules hold whole parameters and shards when they do so in FSDP2, and the same ones."""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import commplan
from commplan.fsdp2 import torch_private
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

NUM_BLOCKS = 3


class Watched(nn.Linear):
    """Its class has a `__setattr__` of its own, to which FSDP2 gives each parameter."""

    def __setattr__(self, name: str, value: Any) -> None:
        seen = self.__dict__.get("seen")
        if seen is not None and isinstance(value, nn.Parameter):
            seen.append((name, isinstance(value, DTensor)))
        super().__setattr__(name, value)


class Block(nn.Module):
    """Two layers with one weight, which FSDP2 exchanges in both, and one bias that does not learn."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.first, self.second = layer(4, 4), layer(4, 4)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Net(nn.Module):
    """A chain of blocks."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.b = nn.Sequential(*(Block(layer) for _ in range(NUM_BLOCKS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x)


def sharded(here: Rank, layer: type[nn.Linear]) -> Any:
    torch.manual_seed(0)
    return models.shard(Net(layer), here.mesh((2, 2)))


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4, requires_grad=True)).sum()
    return loss


def held(block: Any) -> list[tuple[bool, bool, int]]:
    """Of each parameter that a module holds: whether it is a shard, whether it learns, and the size of its memory."""
    parameters = [p for layer in (block.first, block.second) for p in layer._parameters.values()]
    memory = [(p._local_tensor if isinstance(p, DTensor) else p).untyped_storage().nbytes() for p in parameters]
    return [(isinstance(p, DTensor), p.requires_grad, n) for p, n in zip(parameters, memory, strict=True)]


def watch(model: Any, seen: list[Any], whole: list[Any]) -> None:
    """Note what each block holds in its backward, and its whole weight in forward."""

    def note(block: Block, n: int) -> None:
        block.first.register_full_backward_pre_hook(lambda layer, grad: seen.append(held(block)))
        block.first.register_forward_hook(lambda layer, args, out: whole.__setitem__(n, layer.weight))

    for n, block in enumerate(model.b):
        note(block, n)


def what_blocks_hold(here: Rank, schedule: str) -> tuple[list[Any], list[Any]]:
    """In each block's backward and after the last one, in stock FSDP2 and under a schedule; what learns changes in between."""
    found: list[list[Any]] = []
    for name in (None, schedule):
        model, seen = sharded(here, nn.Linear), []
        found.append(seen)
        attachment = commplan.attach(model, name) if name is not None else None
        whole: list[Any] = [None] * NUM_BLOCKS
        watch(model, seen, whole)
        for learns in (True, False, True):
            loss = loss_of(model)
            for block in model.b:
                block.second.bias.requires_grad_(learns)
            loss.backward()
            seen.append([held(block) for block in model.b])
            seen.append([one.untyped_storage().nbytes() for one in whole])
        if attachment is not None:
            attachment.detach()
    return found[0], found[1]


@pytest.mark.parametrize("schedule", ["overlapped_allreduce", "prefetch_overlap"])
def test_modules_hold_what_they_hold_in_fsdp2(worlds: Worlds, schedule: str) -> None:
    for stock, scheduled in worlds.of(4).run(what_blocks_hold, schedule=schedule):
        assert scheduled == stock
        *of_backward, after, memory = stock[: NUM_BLOCKS + 2]
        assert [any(is_shard for is_shard, _, _ in block) for block in of_backward] == [False] * NUM_BLOCKS
        assert all(is_shard for block in after for is_shard, _, _ in block)
        assert memory == [0] * NUM_BLOCKS


def calls_of_a_users_own(here: Rank, schedule: str) -> int:
    """How often a backward reshards by a method that a user put on each group."""
    model, called = sharded(here, nn.Linear), []
    with commplan.attach(model, schedule), contextlib.ExitStack() as stack:
        for block in model.b:
            for group in torch_private.groups(torch_private.state_of(block)):
                original = group.reshard
                own = functools.partial(lambda original: (called.append(None), original()), original)
                stack.enter_context(patch.object(group, "reshard", own))
        loss = loss_of(model)
        called.clear()
        loss.backward()
    return len(called)


@pytest.mark.parametrize("schedule", ["overlapped_allreduce", "prefetch_overlap"])
def test_a_method_that_a_user_put_in_place_is_called(worlds: Worlds, schedule: str) -> None:
    assert worlds.of(4).run(calls_of_a_users_own, schedule=schedule) == [NUM_BLOCKS] * 4


def what_is_set(here: Rank, schedule: str) -> tuple[list[Any], list[Any]]:
    """Parameters that are given to a class with its own `__setattr__` in the second step, by FSDP2 and under a schedule."""
    found: list[list[Any]] = []
    for name in (None, schedule):
        model, seen = sharded(here, Watched), []
        found.append(seen)
        attachment = commplan.attach(model, name) if name is not None else None
        loss_of(model).backward()
        for block in model.b:
            for layer in (block.first, block.second):
                layer.__dict__["seen"] = seen
        loss_of(model).backward()
        if attachment is not None:
            attachment.detach()
    return found[0], found[1]


@pytest.mark.parametrize("schedule", ["overlapped_allreduce", "prefetch_overlap"])
def test_a_module_may_take_its_parameters_by_itself(worlds: Worlds, schedule: str) -> None:
    for stock, scheduled in worlds.of(4).run(what_is_set, schedule=schedule):
        assert sorted(scheduled) == sorted(stock)
        # Shared ones twice; whole for forward and for backward, a shard after each.
        assert len(stock) == NUM_BLOCKS * 4 * 4
