"""Emulated compute: backward sleeps where an accelerator would compute.

A sleeping process leaves its core to the collectives, as a GPU or an NPU leaves the host and the network to them.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

Slept = list[tuple[float, float]]
"""When it slept: begin and end, `time.perf_counter` seconds."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, slept: Slept | None) -> torch.Tensor:
        ctx.seconds, ctx.slept = seconds, slept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        begin_s = time.perf_counter()
        if ctx.seconds:
            time.sleep(ctx.seconds)
        if ctx.slept is not None:
            ctx.slept.append((begin_s, time.perf_counter()))
        return grad, None, None


def sleep_in_backward(x: torch.Tensor, seconds: float, slept: Slept | None = None) -> torch.Tensor:
    """`x`, whose gradient comes `seconds` late; `slept` gets when."""
    delayed: torch.Tensor = _Sleep.apply(x, seconds, slept)  # type: ignore[no-untyped-call]
    return delayed


class SleepingLinear(nn.Module):
    """One square weight and little arithmetic; backward sleeps `seconds` before its gradient is computed."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.seconds = 0.0
        self.slept: Slept = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, dim) -> the same shape."""
        return x + sleep_in_backward(torch.tanh(self.linear(x)), self.seconds, self.slept)
