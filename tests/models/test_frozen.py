"""Models of which only a part is trained, and another part later."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import commplan
from tests.models.comparing import Case, adamw, compare, fully_sharded, on_plain_input, spread
from tests.worlds import models, parity
from tests.worlds.world import Rank, Worlds


class Adapted(nn.Module):
    """A frozen Linear with a trained detour of low rank (LoRA)."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Linear(4, rank, bias=False)
        self.up = nn.Linear(rank, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Lora(nn.Module):
    """A frozen embedding and a frozen head around adapted blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4).requires_grad_(False)
        self.b = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.b:
            x = block(x)
        return self.head(x)


def embedding_too(model: nn.Module, here: Rank) -> nn.Module:
    """Units of which nothing is trained: embedding, head, and the frozen half of each block."""
    for block in model.b:
        fully_sharded(block.base, block, here=here)
    fully_sharded(model.embedding, model.head, model, here=here)
    return model


def frozen_block(index: int) -> nn.Module:
    net = models.Net()
    net.b[index].requires_grad_(False)
    return net


def thawing(model: nn.Module, rank: int, number: int) -> None:
    """Block by block, from the last to the first, as in gradual unfreezing."""
    for i, block in enumerate(model.b):
        block.requires_grad_(i >= 2 - number)
    on_plain_input(model, rank, number)


def half_thawing(model: nn.Module, rank: int, number: int) -> None:
    """First the detours alone, then the frozen parts of the same groups too, then other ones."""
    for i, block in enumerate(model.b):
        block.base.requires_grad_(number == 1 or (number == 2 and i == 1))
        block.down.requires_grad_(number != 2)
    on_plain_input(model, rank, number)


def first_accumulated(model: nn.Module, rank: int, number: int) -> None:
    """What is thawed between two microbatches has one gradient, the rest have two."""
    for i in range(2):
        if hasattr(model, "set_requires_all_reduce"):
            parity.set_flags(model, {"sync": i == 1})
        model.b[1].requires_grad_(i == 1)
        on_plain_input(model, rank, 2 * number + i)


CASES = {
    "LoRA": Case(Lora, on_plain_input, optimizer=adamw),
    "LoRA, frozen units": Case(Lora, on_plain_input, embedding_too, optimizer=adamw),
    "first block frozen": Case(lambda: frozen_block(0), on_plain_input),
    "middle block frozen": Case(lambda: frozen_block(1), on_plain_input),
    "last block frozen": Case(lambda: frozen_block(2), on_plain_input),
    "thawing blocks": Case(models.Net, thawing, optimizer=adamw),
    "thawing within groups": Case(Lora, half_thawing, optimizer=adamw),
    "thawing between microbatches": Case(models.Net, first_accumulated, optimizer=adamw),
}


def ignored(model: nn.Module, here: Rank, *, frozen: bool) -> nn.Module:
    """FSDP2 leaves the head alone."""
    model.head.requires_grad_(not frozen)
    for block in model.b:
        fully_shard(block, mesh=here.mesh((2, 2)))
    return fully_shard(model, mesh=here.mesh((2, 2)), ignored_params=set(model.head.parameters()))


CASES["frozen and ignored"] = Case(models.Net, on_plain_input, partial(ignored, frozen=True), has_reference=False)


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.parametrize("name", CASES)
def test_frozen(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)


def ignored_but_trained(here: Rank) -> str:
    with pytest.raises(commplan.CommplanError) as caught:
        commplan.attach(ignored(models.Net(), here, frozen=False), "blocking")
    return str(caught.value)


def test_ignored_parameters_have_to_be_frozen(worlds: Worlds) -> None:
    """Nothing would reduce their gradients."""
    for message in worlds.of(4).run(ignored_but_trained):
        assert "'head.weight' has no op" in message
        assert "ignored_params" in message


def nothing_trained(here: Rank) -> str:
    model = models.shard(models.Net().requires_grad_(False), here.mesh((2, 2)))
    try:
        commplan.attach(model, "blocking")
    except commplan.CommplanError as error:
        return str(error)
    raise AssertionError("it was not refused")


def test_a_model_of_which_nothing_is_trained(worlds: Worlds) -> None:
    for message in worlds.of(4).run(nothing_trained):
        assert "requires a gradient" in message
