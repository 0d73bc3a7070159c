"""How a model is put together: units in units, several groups in a unit, tied weights, odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.models.comparing import LATE, WORKERS, Case, compare, fully_sharded, on_input, replicas, seeded, spread
from tests.worlds import models
from tests.worlds.world import Rank, Worlds


class Around(nn.Module):
    """Runs some of its own parameters before, and some after, a unit inside it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.after = nn.Linear(4, 4)
        self.inside = inside
        self.before = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(torch.tanh(self.inside(torch.tanh(self.before(x)))))


def nested() -> nn.Module:
    """Three levels, twice; registered in another order than they run."""
    return nn.Sequential(Around(Around(nn.Linear(4, 4))), Around(nn.Linear(4, 4)), nn.Linear(4, 4))


def shard_nested(model: nn.Module, here: Rank) -> nn.Module:
    units = [m for m in model.modules() if isinstance(m, Around)]
    fully_sharded(*(u.inside for u in units if isinstance(u.inside, nn.Linear)), *reversed(units), model, here=here)
    return model


def shard_inner_only(model: nn.Module, here: Rank) -> nn.Module:
    """The outer units are left to the root."""
    fully_sharded(*reversed([m.inside for m in model.modules() if isinstance(m, Around)]), model, here=here)
    return model


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.b = nn.ModuleList(models.Tanh() for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.b:
            x = block(x)
        return self.head(self.norm(x))


def on_tokens(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    tokens = torch.arange(5).roll(rank + number) + rank % 3
    loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
    loss.backward()
    return loss


def tie_in_a_list(model: nn.Module, here: Rank) -> nn.Module:
    """Embedding and head are sharded together: one group of two modules, at the two ends of forward."""
    fully_shard([model.embedding, model.head], mesh=replicas(here))
    fully_sharded(*model.b, model, here=here)
    return model


class Odd(nn.Module):
    """Parameters whose shards have unequal lengths, or are empty on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList([nn.Linear(4, 1), nn.Linear(1, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 4)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = torch.tanh(block(x))
        return self.scale * x


def on_four(model: nn.Module, here: Rank) -> nn.Module:
    return models.shard(model, here.mesh((4,), ("shard",)))


def on_last_dim(model: nn.Module, here: Rank) -> nn.Module:
    """Matrices are split by columns, vectors as ever."""
    return models.shard(model, here.mesh((2, 2)), shard_placement_fn=lambda p: Shard(p.ndim - 1))


def middle_dim(model: nn.Module, here: Rank) -> nn.Module:
    """Convolutions are split by input channels."""
    place = lambda p: Shard(1) if p.ndim == 4 else None  # noqa: E731
    fully_sharded(*(m for m in model if isinstance(m, nn.Conv2d)), model, here=here, shard_placement_fn=place)
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(24, 3))


def on_image(model: nn.Module, rank: int, number: int) -> None:
    model(seeded(rank, number, 2, 2, 6, 6)).pow(2).mean().backward()


CASES = {
    "units in units": Case(nested, on_input, shard_nested),
    "inner units only": Case(nested, on_input, shard_inner_only),
    "tied in the root": Case(Tied, on_tokens),
    "tied in a list": Case(Tied, on_tokens, tie_in_a_list),
    "odd shapes": Case(Odd, on_input),
    "odd shapes on four": Case(Odd, on_input, on_four),
    "last dim": Case(lambda: models.Net(), on_input, on_last_dim),
    "middle dim": Case(convolutions, on_image, middle_dim),
}


SIX = ("units in units", "tied in a list", "odd shapes")


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], [WORKERS, *LATE] if name == "units in units" else spread(name))


@pytest.mark.report("shards of length zero", "pytorch#176225")
@pytest.mark.parametrize("name", CASES)
def test_structure(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)


@pytest.mark.report("shards of length zero")
@pytest.mark.parametrize("name", SIX)
def test_structure_on_six_ranks(worlds: Worlds, name: str) -> None:
    """Where a wrong reduce op shows in the last bit, and shards are more unequal."""
    worlds.of(6).run(run, name=name)
