"""Live communication memory: what is allocated, and the most that ever was."""

from __future__ import annotations

import time

import torch


class Memory:
    """Allocates communication buffers and counts those alive, gradients that wait for their reduction included.

    Attributes:
        history: when (`time.perf_counter` seconds, on the host) how many bytes were alive from then on, since `restart_peak`.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.history: list[tuple[float, int]] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised buffer of shape (numel,)."""
        buffer = torch.empty(numel, dtype=dtype, device=device)
        self.hold(buffer.nbytes)
        return buffer

    def release(self, buffer: torch.Tensor, *, kept: bool = False) -> None:
        """Stop counting `buffer`; `kept` says that somebody else owns it from now on, so that its content counts."""
        self.drop(buffer.nbytes)

    def borrow(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised buffer of shape (numel,) for parameters, which are no communication memory: not counted."""
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody reads what was borrowed any more."""

    def hold(self, size_bytes: int) -> None:
        """Count memory that was not allocated here."""
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.history.append((time.perf_counter(), self.live_bytes))

    def drop(self, size_bytes: int) -> None:
        """Stop counting it."""
        self.live_bytes -= size_bytes
        self.history.append((time.perf_counter(), self.live_bytes))

    def restart_peak(self) -> None:
        """Measure the peak anew, from what is alive now."""
        self.peak_bytes = self.live_bytes
        self.history = [(time.perf_counter(), self.live_bytes)]
