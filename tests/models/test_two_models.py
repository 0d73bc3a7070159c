"""Several sharded models in one process, each driven by itself: taking turns, and in one backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, share_comm_ctx

from tests.models.comparing import LATE, WORKERS, Case, compare, seeded, spread
from tests.worlds import models
from tests.worlds.world import Rank, Worlds


class Pair(nn.ModuleDict):
    """Two models in one container that is not sharded itself."""

    def __init__(self) -> None:
        super().__init__({"one": models.Net(), "other": models.Net((0, 2, 1))})


class Gan(nn.ModuleDict):
    """A generator and its critic."""

    def __init__(self) -> None:
        critic = models.Net()
        critic.head = nn.Linear(4, 1)
        generator = models.Net()
        generator.head = nn.Linear(4, 4)
        super().__init__({"generator": generator, "critic": critic})


def shard(model: nn.Module, here: Rank) -> nn.Module:
    for part in model.values():
        models.shard(part, here.mesh((2, 2)))
    return model


def both_meshes(model: nn.Module, here: Rank) -> nn.Module:
    """The second model has no replicas."""
    models.shard(model["one"], here.mesh((2, 2)))
    models.shard(model["other"], here.mesh((4,), ("shard",)))
    return model


def one_context(model: nn.Module, here: Rank) -> nn.Module:
    """FSDP2's streams and buffers are shared between the two."""
    shard(model, here)
    share_comm_ctx(each(model))
    return model


def each(model: nn.Module) -> Sequence[nn.Module]:
    return list(model.values())


def first(model: nn.Module) -> Sequence[nn.Module]:
    return list(model.values())[:1]


def one_loss(model: nn.Module, rank: int, number: int) -> None:
    """One backward through both, side by side."""
    x = seeded(rank, number, 3, 4).requires_grad_()
    (model["one"](x).pow(2).sum() + model["other"](x).sum()).backward()


def two_losses(model: nn.Module, rank: int, number: int) -> None:
    """Both forwards, then both backwards, crosswise."""
    x = seeded(rank, number, 3, 4)
    losses = [part(x).pow(2).sum() for part in model.values()]
    for loss in losses if number % 2 else reversed(losses):
        loss.backward()


def adversarial(model: nn.Module, rank: int, number: int) -> None:
    """A step for the critic, of two backwards; one for the generator, through a critic that learns from it too."""
    noise, real = seeded(rank, number, 3, 4), seeded(rank, 50 + number, 3, 4)
    model["critic"](model["generator"](noise).detach()).mean().backward()
    (-model["critic"](real).mean()).backward()
    (-model["critic"](model["generator"](noise)).mean()).backward()


def adversarial_frozen(model: nn.Module, rank: int, number: int) -> None:
    """While the generator learns the critic does not."""
    noise, real = seeded(rank, number, 3, 4), seeded(rank, 50 + number, 3, 4)
    loss = model["critic"](model["generator"](noise).detach()).mean() - model["critic"](real).mean()
    loss.backward()
    model["critic"].requires_grad_(False)
    (-model["critic"](model["generator"](noise)).mean()).backward()
    model["critic"].requires_grad_(True)


def teacher(model: nn.Module, rank: int, number: int) -> None:
    """The first learns from the second, which runs without a graph."""
    x = seeded(rank, number, 3, 4).requires_grad_()
    with torch.no_grad():
        right = model["other"](x)
    (model["one"](x) - right).pow(2).sum().backward()


CASES = {
    "one loss": Case(Pair, one_loss, shard, parts=each),
    "one loss, other meshes": Case(Pair, one_loss, both_meshes, parts=each),
    "one loss, one driven": Case(Pair, one_loss, shard, parts=first),
    "one loss, driven together": Case(Pair, one_loss, shard),
    "one loss, one context": Case(Pair, one_loss, one_context, parts=each),
    "two losses": Case(Pair, two_losses, shard, parts=each),
    "two losses, driven together": Case(Pair, two_losses, shard),
    "adversarial": Case(Gan, adversarial, shard, parts=each),
    "adversarial, driven together": Case(Gan, adversarial, shard),
    "adversarial, critic frozen": Case(Gan, adversarial_frozen, shard, parts=each),
    "teacher": Case(Pair, teacher, shard, parts=first),
}


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.parametrize("name", CASES)
def test_two_models(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)


def blocks_only(model: nn.Module, here: Rank) -> nn.Module:
    """No sharded root: each block is one of its own."""
    for block in model:
        fully_shard(block, mesh=here.mesh((2, 2)))
    return model


def on_input(model: nn.Module, rank: int, number: int) -> None:
    model(seeded(rank, number, 3, 4).requires_grad_()).pow(2).sum().backward()


def many_roots(here: Rank) -> None:
    case = Case(lambda: nn.Sequential(*(models.Tanh() for _ in range(4))), on_input, blocks_only)
    compare(here, case, [WORKERS, *LATE])


def test_blocks_without_a_root(worlds: Worlds) -> None:
    worlds.of(4).run(many_roots)
