"""What a forward takes and returns, and how often, in which order and under which modes it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from tests.models.comparing import Case, compare, on_input, seeded, spread
from tests.worlds import models
from tests.worlds.world import Rank, Worlds


@dataclass
class Hidden:
    x: torch.Tensor
    aux: torch.Tensor | None = None


class Named(NamedTuple):
    x: torch.Tensor
    count: int


RETURNS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dict": (lambda x: {"x": x, "shape": x.shape, "nothing": None}, lambda out: out["x"]),
    "dataclass": (lambda x: Hidden(x, x.mean()), lambda out: out.x + out.aux),
    "tuple": (lambda x: (None, x, [x * 2]), lambda out: out[1] + out[2][0]),
    "named tuple": (lambda x: Named(x, 3), lambda out: out.x),
    "nested": (lambda x: {"a": [(x, None), {"b": x.sin()}]}, lambda out: out["a"][0][0] + out["a"][1]["b"]),
}


class Returning(nn.Module):
    """FN whose blocks take keywords only and return something else than a tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.b = nn.ModuleList(Keyword(kind) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.unpack = RETURNS[kind][1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = self.unpack(block(options={"scale": 0.5}, x=x, mask=None))
        return self.head(x)


class Keyword(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.pack = RETURNS[kind][0]

    def forward(self, *, x: torch.Tensor, mask: torch.Tensor | None, options: dict[str, float]) -> Any:
        return self.pack(torch.tanh(self.linear(x)) * options["scale"])


class Loose(nn.Module):
    """One block returns None and leaves its result behind, another returns what does not need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList([Left(), Counted(), models.Tanh()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b[0](x)
        x = self.b[2](self.b[0].left)
        self.b[0].left = None
        return self.head(x) * self.b[1](x)


class Left(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.left: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> None:
        self.left = torch.tanh(self.linear(x))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> float:
        return self.linear(x).detach().mean().item()


def gathered(model: nn.Module, here: Rank) -> nn.Module:
    """FSDP2 gathers nothing in backward for a unit without an output that needs a gradient: it has to stay whole."""
    return models.shard(model, here.mesh((2, 2)), reshard=False)


class Dropping(nn.Module):
    """Runs its blocks in another order, or leaves some out, in each forward; alike on every rank."""

    orders = ((0, 1, 2), (2, 1), (1, 0, 2), (0,), (2, 0, 1, 0))

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(models.Tanh() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        for i in self.orders[number % len(self.orders)]:
            x = self.b[i](x)
        return self.head(x)


def in_turn(model: nn.Module, rank: int, number: int) -> None:
    model(seeded(rank, number, 3, 4).requires_grad_(), number=number).pow(2).sum().backward()


def evaluated(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """Forwards without a graph of its own stand between a forward and its backward, and between steps."""
    x = seeded(rank, number, 3, 4).requires_grad_()
    with torch.no_grad():
        before = model(x)
    loss = model(x).pow(2).sum()
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    loss.backward()
    return before


def inferred(model: nn.Module, rank: int, number: int) -> None:
    """FSDP2 itself can't train any more where inference mode comes first."""
    if number > 0:
        with torch.inference_mode():
            model(seeded(rank, 9, 3, 4))
    on_input(model, rank, number)


def abandoned(model: nn.Module, rank: int, number: int) -> None:
    """A forward whose graph is thrown away."""
    model(seeded(rank, 7, 3, 4).requires_grad_(), number=3).sum()
    in_turn(model, rank, number)


def directly(model: nn.Module, rank: int, number: int) -> None:
    """A unit is called by itself after the model."""
    on_input(model, rank, number)
    model.b[1](seeded(rank, number, 3, 4).requires_grad_()).sum().backward()


def beside(model: nn.Module, rank: int, number: int) -> None:
    """A unit is called before the model, in the same graph; the model itself has to run before any unit does."""
    if number == 0:
        with torch.no_grad():
            model(seeded(rank, number, 3, 4))
    x = model.b[2](seeded(rank, number, 3, 4).requires_grad_())
    model(x).pow(2).sum().backward()


class Methods(nn.Module):
    """Used through other methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(models.Tanh() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.b[0](x) * self.scale

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.b[1](x) / self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def methods(model: nn.Module, here: Rank) -> nn.Module:
    models.shard(model, here.mesh((2, 2)))
    for name in ("encode", "decode"):
        register_fsdp_forward_method(model, name)
    return model


def through_methods(model: nn.Module, rank: int, number: int) -> None:
    model.decode(model.encode(seeded(rank, number, 3, 4).requires_grad_())).pow(2).sum().backward()


def whole(model: nn.Module, here: Rank) -> nn.Module:
    return fully_shard(model, mesh=here.mesh((2, 2)))


CASES = {f"returns {kind}": Case(lambda kind=kind: Returning(kind), on_input) for kind in RETURNS}
CASES |= {
    "returns None, or no tensor": Case(Loose, on_input, gathered),
    "orders that vary": Case(Dropping, in_turn, num_steps=6),
    "evaluation in between": Case(models.Net, evaluated),
    "inference mode in between": Case(models.Net, inferred),
    "abandoned forward": Case(Dropping, abandoned),
    "a unit by itself": Case(models.Net, directly),
    "a unit outside": Case(models.Net, beside, gathered),
    "other methods": Case(Methods, through_methods, methods),
    "one unit": Case(models.Net, on_input, whole),
}


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.parametrize("name", CASES)
def test_forwards(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)
