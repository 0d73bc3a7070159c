"""The last forward of a step once more, with its backward: the same work for every schedule, so that gradients compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from commplan.errors import ExecutionError
from commplan.fsdp2 import torch_private as private

Gradients = list[torch.Tensor | None]
"""This rank's part of each gradient, in the order of `model.parameters()`."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The inputs of a forward, and the autocast that it ran under."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None


class Replay:
    """Remembers the inputs of the last training forward of `model`, and runs it again.

    What a forward draws or keeps starts each time from the same: random numbers, buffers. `.grad` is as before afterwards.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._call: _Call | None = None
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Self:
        hook = private.without_dynamo(self._before_forward)
        self._handle = self._model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._call = None

    def gradients(self) -> Gradients | None:
        """The gradients of that forward; of an output that is no scalar, those of its mean square.

        None where there is nothing to repeat: no forward was seen, or no output has a gradient.

        Raises:
            ExecutionError: the forward or its backward can't be repeated.
        """
        if self._call is None:
            return None
        try:
            return self._run(self._call)
        except Exception as error:
            raise ExecutionError(
                f"a step could not be repeated to compare gradients ({type(error).__name__}: {error}); "
                "--no-gradients leaves that out"
            ) from error

    def _run(self, call: _Call) -> Gradients | None:
        parameters = list(self._model.parameters())
        kept = [p.grad for p in parameters]
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        on_device = [self._device] if self._device.type != "cpu" else []
        for p in parameters:
            p.grad = None
        try:
            with torch.random.fork_rng(on_device, device_type=self._device.type), torch.enable_grad():
                torch.manual_seed(0)
                with torch.autocast(self._device.type, dtype=call.autocast, enabled=call.autocast is not None):
                    output = self._model(*_detached(call.args), **_detached(call.kwargs))
                scalars = [t if t.numel() == 1 else t.float().square().mean() for t in _tensors(output) if t.requires_grad]
                if not scalars:
                    return None
                torch.stack([scalar.reshape(()) for scalar in scalars]).sum().backward()
            return [None if p.grad is None else _local(p.grad) for p in parameters]
        finally:
            for p, grad in zip(parameters, kept, strict=True):
                p.grad = grad
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not private.in_autograd():
            kind = self._device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            self._call = _Call(args, dict(kwargs), autocast)


def difference(one: Gradients, other: Gradients) -> tuple[float, float]:
    """The largest difference of an entry, and the largest entry of `other`; infinite where only one has a gradient."""
    furthest = largest = 0.0
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            furthest = furthest if a is b else float("inf")
        elif a.numel():
            largest = max(largest, float(b.abs().max()))
            if not torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True):
                apart = float((a - b).abs().max())
                furthest = max(furthest, apart if apart == apart else float("inf"))
    return furthest, largest


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested mappings, sequences and objects with fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))


def _detached(value: Any) -> Any:
    """`value` with tensors that lead into no graph that is gone."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad) if value.grad_fn is not None else value
    if type(value) in (list, tuple):
        return type(value)(_detached(part) for part in value)
    if type(value) is dict:
        return {key: _detached(part) for key, part in value.items()}
    return value
