"""Activation checkpointing of both kinds: around sharded units, inside them, and of units in units."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.models.comparing import Case, compare, fully_sharded, on_input, spread
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

KINDS = {"reentrant": CheckpointImpl.REENTRANT, "not reentrant": CheckpointImpl.NO_REENTRANT}


class Two(nn.Module):
    """A block of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.other = nn.Linear(6, 4)
        self.use_reentrant: bool | None = None

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.one(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return x + self._run(x)
        return x + checkpoint(self._run, x, use_reentrant=self.use_reentrant)


class Stack(nn.Module):
    """Blocks, run one by one or each in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(Two() for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.use_reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def around(model: nn.Module, here: Rank, *, kind: CheckpointImpl) -> nn.Module:
    """Forward puts each sharded block into a checkpoint."""
    model.use_reentrant = kind is CheckpointImpl.REENTRANT
    return models.shard(model, here.mesh((2, 2)))


def inside(model: nn.Module, here: Rank, *, kind: CheckpointImpl) -> nn.Module:
    """A sharded block checkpoints what it does."""
    for block in model.b:
        block.use_reentrant = kind is CheckpointImpl.REENTRANT
    return models.shard(model, here.mesh((2, 2)))


def wrapped(model: nn.Module, here: Rank, *, kind: CheckpointImpl) -> nn.Module:
    """torch's wrapper around each block, then sharded as usual: the unit is the wrapper."""
    apply_activation_checkpointing(
        model, partial(checkpoint_wrapper, checkpoint_impl=kind), check_fn=lambda m: isinstance(m, Two)
    )
    return models.shard(model, here.mesh((2, 2)))


def wrapped_after(model: nn.Module, here: Rank, *, kind: CheckpointImpl) -> nn.Module:
    """Sharded first: the wrapper lies around the unit."""
    models.shard(model, here.mesh((2, 2)))
    for i, block in enumerate(model.b):
        model.b[i] = checkpoint_wrapper(block, checkpoint_impl=kind)
    return model


def units_inside(model: nn.Module, here: Rank, *, kind: CheckpointImpl) -> nn.Module:
    """Each checkpoint runs two units in one."""
    model.use_reentrant = kind is CheckpointImpl.REENTRANT
    for block in model.b:
        fully_sharded(block.one, block.other, block, here=here)
    return fully_shard(model, mesh=here.mesh((2, 2)))


def mixed_precision(model: nn.Module, here: Rank, *, kind: CheckpointImpl) -> nn.Module:
    model.use_reentrant = kind is CheckpointImpl.REENTRANT
    return models.shard(model, here.mesh((2, 2)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


class Segments(nn.Module):
    """checkpoint_sequential: segments of several blocks."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.b = nn.Sequential(*(Two() for _ in range(4)))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(self.b, 2, x, use_reentrant=self.use_reentrant)


SHARDINGS = (around, inside, wrapped, wrapped_after, units_inside)

CASES = {
    f"{s.__name__}, {name}": Case(Stack, on_input, partial(s, kind=kind)) for s in SHARDINGS for name, kind in KINDS.items()
}
CASES |= {
    f"bf16, {name}": Case(Stack, on_input, partial(mixed_precision, kind=kind), has_reference=False)
    for name, kind in KINDS.items()
}
CASES |= {f"segments, {name}": Case(partial(Segments, use_reentrant=name == "reentrant"), on_input) for name in KINDS}


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.report("checkpointing around and inside units")
@pytest.mark.parametrize("name", CASES)
def test_checkpointing(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)
