"""torch.compile of each block, before it is sharded and after, and of the whole model."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.models.comparing import LATE, WORKERS, Case, compare, seeded
from tests.worlds import models
from tests.worlds.world import Rank, Worlds


class Counted:
    """A backend that counts the graphs that it was given."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        self.num_graphs += 1
        return self._backend(graph, inputs, **kwargs)


BACKENDS: dict[str, Callable[..., Any]] = {"eager": lambda graph, inputs: graph.forward, "aot_eager": aot_eager}


def shard(model: nn.Module, here: Rank, *, backend: Any, when: str, bf16: bool = False) -> nn.Module:
    # What one model left would count as recompilation of the next.
    torch._dynamo.reset()
    kwargs = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if bf16 else {}
    if when == "before":
        for i, block in enumerate(model.b):
            model.b[i] = torch.compile(block, backend=backend)
    models.shard(model, here.mesh((2, 2)), **kwargs)
    if when == "after":
        for block in model.b:
            block.compile(backend=backend)
    if when == "whole":
        model.compile(backend=backend)
    return model


class Checkpointed(models.Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def on_input(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """The batch grows, so that shapes become dynamic."""
    loss = model(seeded(rank, number, 3 + number, 4).requires_grad_()).float().pow(2).sum()
    loss.backward()
    return loss


def run(here: Rank, backend: str, when: str) -> None:
    counted = Counted(BACKENDS[backend])
    made = partial(shard, backend=counted, when=when)
    compare(here, Case(models.Net, on_input, made, num_steps=2), LATE[:1])
    assert counted.num_graphs >= 3


def others(here: Rank) -> None:
    made = partial(shard, backend="aot_eager", when="after")
    compare(here, Case(Checkpointed, on_input, made, num_steps=2), [WORKERS])
    compare(here, Case(models.Net, on_input, partial(made, bf16=True), num_steps=2, has_reference=False), LATE[1:2])


@pytest.mark.parametrize("when", ["before", "after", "whole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(worlds: Worlds, backend: str, when: str) -> None:
    worlds.of(4).run(run, backend=backend, when=when)


def test_with_checkpoints_and_in_low_precision(worlds: Worlds) -> None:
    worlds.of(4).run(others)


def with_inductor(here: Rank) -> None:
    compare(here, Case(models.Net, on_input, partial(shard, backend="inductor", when="after"), num_steps=1), [WORKERS])


CAN_BUILD = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.skipif(not CAN_BUILD, reason="inductor needs g++ and Python's headers")
def test_inductor(worlds: Worlds) -> None:
    worlds.of(4).run(with_inductor)
