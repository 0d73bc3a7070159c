"""Right values that owe nothing to FSDP2: an unsharded copy of the model in fp32, its loss averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.worlds import parity

TOLERANCE = 1e-6

Backward = Callable[[nn.Module, int], None]
"""(model, rank) -> runs every backward of one optimizer step with that rank's data."""


def gradients(build: Callable[[], nn.Module], num_ranks: int, backward: Backward) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of whole gradients, by parameter name."""
    torch.manual_seed(0)
    model = build()
    for rank in range(num_ranks):
        backward(model, rank)
    return {name: None if p.grad is None else p.grad / num_ranks for name, p in model.named_parameters()}


def microbatches(problem: parity.Problem, count: int) -> Backward:
    """The problem's loss on its first `count` batches."""

    def backward(model: nn.Module, rank: int) -> None:
        for i in range(count):
            problem.loss(model(problem.batch(rank, i)), rank).backward()

    return backward


def assert_close(model: nn.Module, expected: dict[str, torch.Tensor | None], tolerance: float = TOLERANCE) -> None:
    """Compare the gradients of a sharded model, which this gathers: every rank has to call it."""
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        grad = found[name].grad
        assert (grad is None) == (right is None), f"{name}: {grad} against {right}"
        if grad is not None and right is not None:
            off = (grad.full_tensor().float() - right).abs().max()  # type: ignore[attr-defined]
            assert off <= tolerance, f"{name}: off by {off}"


def values(model: nn.Module) -> Sequence[float | None]:
    """For models whose gradients have one value each: that value, exactly, or None without a gradient."""
    found: list[float | None] = []
    for p in model.parameters():
        if p.grad is None:
            found.append(None)
            continue
        unique = p.grad.to_local().unique()  # type: ignore[attr-defined]
        assert unique.numel() <= 1, unique
        found.append(unique.item() if unique.numel() else None)
    return found
