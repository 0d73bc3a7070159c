"""Repeating a forward: equal from time to time, and without a trace in the model that is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from commplan.bench.replay import Gradients, Replay, difference
from commplan.errors import ExecutionError

CPU = torch.device("cpu")


class Noisy(nn.Module):
    """Draws random numbers and counts in a buffer; takes its input by keyword too."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.wrap = wrap

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        self.count += 1
        return self.wrap(self.second(self.dropout(self.norm(self.first(x)))) * self.count * scale)


@dataclass
class Output:
    logits: torch.Tensor
    name: str = "output"


@contextmanager
def replaying(model: nn.Module) -> Iterator[Replay]:
    torch.manual_seed(3)
    with Replay(model, CPU) as replay:
        yield replay


def equal(one: Gradients | None, other: Gradients | None) -> bool:
    return one is not None and other is not None and difference(one, other)[0] == 0


def test_a_replay_leaves_no_trace() -> None:
    def trained(replays: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with replaying(model) as replay:
            for _ in range(3):
                model(torch.randn(5, 4), scale=2.0).square().sum().backward()
                optimizer.step()
                if replays:
                    assert equal(replay.gradients(), replay.gradients())
                optimizer.zero_grad(set_to_none=False)
        return [*model.state_dict().values(), *(p.grad for p in model.parameters())]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


def test_a_replay_is_of_the_last_training_forward_with_its_keywords() -> None:
    model = Noisy()
    x = torch.randn(5, 4)
    with replaying(model) as replay:

        def gradients() -> Gradients | None:
            model.count.fill_(1)
            return replay.gradients()

        assert gradients() is None
        model(x, scale=2.0)
        doubled = gradients()
        model(x)
        single = gradients()
        with torch.no_grad():
            model(x, scale=5.0)
        assert equal(gradients(), single)
        model(x, scale=2.0)
        assert equal(gradients(), doubled)
    assert not equal(doubled, single)
    assert replay.gradients() is None


WRAPPERS: list[Callable[[torch.Tensor], Any]] = [
    lambda y: y.square().mean(),
    lambda y: {"loss": y.square().mean(), "name": "n"},
    lambda y: (None, [y]),
    Output,
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_outputs_of_many_kinds(wrap: Callable[[torch.Tensor], Any]) -> None:
    """All of these stand for one loss: a tensor that is no scalar counts as its mean square."""
    found = []
    for of in (wrap, lambda y: y):
        torch.manual_seed(0)
        model = Noisy(of)
        with replaying(model) as replay:
            model(torch.ones(5, 4).cumsum(0))
            found.append(replay.gradients())
    assert equal(*found)


def test_inputs_that_come_from_another_graph() -> None:
    model = Noisy()
    before = nn.Linear(4, 4)
    with replaying(model) as replay:
        model(before(torch.randn(5, 4))).sum().backward()
        kept = before.weight.grad.clone()
        assert equal(replay.gradients(), replay.gradients())
        assert torch.equal(before.weight.grad, kept)


def test_autocast_is_that_of_the_forward() -> None:
    seen: list[torch.dtype] = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with replaying(model) as replay:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(2, 4))
        replay.gradients()
        model(torch.randn(2, 4))
        replay.gradients()
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_nothing_to_repeat_where_no_output_has_a_gradient() -> None:
    model = Noisy(lambda y: y.detach())
    with replaying(model) as replay:
        model(torch.randn(5, 4))
        assert replay.gradients() is None


def test_a_replay_that_raises_says_how_to_do_without() -> None:
    def once(y: torch.Tensor) -> torch.Tensor:
        if model.count > 1:
            raise RuntimeError("only once")
        return y

    model = Noisy(once)
    with replaying(model) as replay:
        model(torch.randn(5, 4))
        with pytest.raises(ExecutionError, match=r"only once.*--no-gradients"):
            replay.gradients()
        assert model.count == 1
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([1.0, float("nan")], [1.0, float("nan")], 0.0),
        ([1.0, float("nan")], [1.0, 2.0], float("inf")),
        (None, None, 0.0),
        ([1.0, 2.0], None, float("inf")),
        (None, [1.0, 2.0], float("inf")),
        ([], [], 0.0),
    ],
)
def test_differences(one: list[float] | None, other: list[float] | None, apart: float) -> None:
    def gradients(of: list[float] | None) -> Gradients:
        return [torch.zeros(3), None if of is None else torch.tensor(of)]

    assert difference(gradients(one), gradients(other))[0] == apart
