"""A gradient is sent from where autograd left it only if it lies as it is sent, and belongs to nobody else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commplan.fsdp2 import torch_gradients

Made = tuple[torch.Tensor, Any]
"""A gradient, and whatever else is alive."""


class Marked(torch.Tensor):
    """Its data may be elsewhere."""


def group(dim: int = 0) -> Any:
    return SimpleNamespace(fsdp_params=[SimpleNamespace(fsdp_placement=SimpleNamespace(dim=dim))])


def of_autograd(*, keeps: Callable[[torch.Tensor], Any] | None = None) -> Made:
    weight = torch.ones(4, 3, requires_grad=True)
    (torch.randn(2, 4) @ weight).sum().backward()
    gradient, weight.grad = weight.grad, None
    assert gradient is not None
    return gradient, keeps(gradient) if keeps else None


def test_a_gradient_of_autograd_is_sent_from_its_memory() -> None:
    taken = dict(enumerate(of_autograd()[:1]))
    address, expected = taken[0].data_ptr(), taken[0].flatten().tolist()
    found = torch_gradients.take_as_sent(group(), taken, 2, torch.float32)
    assert found is not None
    assert not taken
    assert found.data_ptr() == address
    assert found.tolist() == expected
    assert found.shape == (12,)


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda gradient: gradient,
    "a view": lambda gradient: gradient[1:],
    "another tensor over its memory": lambda gradient: gradient.detach(),
    "its memory": lambda gradient: gradient.untyped_storage(),
    "a place that Python does not see": lambda gradient: _as_grad_of_another(gradient),
}


def _as_grad_of_another(gradient: torch.Tensor) -> torch.Tensor:
    other = torch.zeros_like(gradient, requires_grad=True)
    other.grad = gradient
    return other


@pytest.mark.parametrize("keeps", OTHERS.values(), ids=OTHERS.keys())
def test_not_if_somebody_keeps(keeps: Callable[[torch.Tensor], Any]) -> None:
    gradient, kept = of_autograd(keeps=keeps)
    taken = {0: gradient}
    del gradient
    assert torch_gradients.take_as_sent(group(), taken, 2, torch.float32) is None
    assert list(taken) == [0]
    del kept
    assert torch_gradients.take_as_sent(group(), taken, 2, torch.float32) is not None


LAID_OUT_OTHERWISE: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.ones(3, 4).t(),
    "a part of more": lambda: torch.ones(5, 3)[:4],
    "one element for all": lambda: torch.ones(1, 1).expand(4, 3),
    "another dtype": lambda: torch.ones(4, 3, dtype=torch.bfloat16),
    "memory of numpy's": lambda: torch.from_numpy(np.ones((4, 3), dtype=np.float32)),
    "memory of several processes": lambda: torch.ones(4, 3).share_memory_(),
    "a tensor of another kind": lambda: torch.ones(4, 3).as_subclass(Marked),
    "not negated yet": lambda: torch._neg_view(torch.ones(4, 3)),
}


@pytest.mark.parametrize("make", LAID_OUT_OTHERWISE.values(), ids=LAID_OUT_OTHERWISE.keys())
def test_not_if_it_lies_otherwise(make: Callable[[], torch.Tensor]) -> None:
    taken = {0: make()}
    assert torch_gradients.take_as_sent(group(), taken, 2, torch.float32) is None
    assert list(taken) == [0]


def test_not_if_ranks_have_columns() -> None:
    taken = {0: of_autograd()[0]}
    assert torch_gradients.take_as_sent(group(dim=1), taken, 2, torch.float32) is None
    assert list(taken) == [0]
