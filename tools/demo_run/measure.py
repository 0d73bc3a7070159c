"""What is measured of a backward: times a lane, communication bytes, and digests of tensors."""

from __future__ import annotations

import ctypes
import hashlib
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Sample:
    """One backward of one model: `lanes` maps a lane to its (hidden_s, exposed_s)."""

    backward_s: float
    hidden_s: float
    exposed_s: float
    lanes: dict[str, tuple[float, float]]
    peak_bytes: int
    declared_peak_bytes: int | None


@dataclass
class StockProbe:
    """Stands in front of the collectives of stock FSDP2 while its context is open.

    On CPU they block the thread that runs backward: their time is all exposed, none hidden.  Bytes are counted as a plan
    counts them: a reduce-scatter's input while it is alive, and the reduced shard until it is applied, which stock does
    right after the all-reduce.
    """

    spent_s: dict[str, float] = field(default_factory=lambda: {"shard": 0.0, "replicate": 0.0})
    peak_bytes: int = 0
    _live_bytes: int = 0
    _originals: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> StockProbe:
        # FSDP2 calls `reduce_scatter_single` since torch 2.13, `reduce_scatter_tensor` before.
        self._originals = {
            name: getattr(dist, name)
            for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
            if hasattr(dist, name)
        }
        for name, collective in self._originals.items():
            setattr(dist, name, partial(self._reduce if name == "all_reduce" else self._scatter, collective))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name, collective in self._originals.items():
            setattr(dist, name, collective)

    def sample(self, backward_s: float) -> Sample:
        """What was seen since the probe was made."""
        lanes = {lane: (0.0, spent) for lane, spent in self.spent_s.items()}
        return Sample(backward_s, 0.0, sum(self.spent_s.values()), lanes, self.peak_bytes, None)

    def _scatter(self, collective: Any, **arguments: Any) -> Any:
        size_bytes = arguments["input"].nbytes
        self._live_bytes += size_bytes
        weakref.finalize(arguments["input"], self._release, size_bytes)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes + arguments["output"].nbytes)
        return self._timed("shard", collective, **arguments)

    def _reduce(self, collective: Any, *args: Any, **kwargs: Any) -> Any:
        return self._timed("replicate", collective, *args, **kwargs)

    def _release(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes

    def _timed(self, lane: str, collective: Any, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return collective(*args, **kwargs)
        finally:
            self.spent_s[lane] += time.perf_counter() - begin_s


def attached_sample(report: Any) -> Sample:
    """The same of a backward that a schedule drove; `report` is `attachment.last_backward`."""
    lanes = {lane: (report.hidden_s(lane), report.exposed_s(lane)) for lane in dict.fromkeys(op.lane for op in report.ops)}
    return Sample(
        report.end_s - report.begin_s,
        report.hidden_s(),
        report.exposed_s(),
        lanes,
        report.peak_bytes,
        report.declared_peak_bytes,
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def largest_difference(first: Iterable[torch.Tensor | None], second: Iterable[torch.Tensor | None]) -> float:
    """Largest |a - b| over two lists of gradients; a gradient that only one side has counts as infinitely far off."""
    largest = 0.0
    for one, other in zip(first, second, strict=True):
        if one is None and other is None:
            continue
        if one is None or other is None:
            return float("inf")
        a, b = local(one), local(other)
        if a.numel():
            difference = float((a - b).abs().max())
            if difference != difference:
                return float("inf")
            largest = max(largest, difference)
    return largest


class Digest:
    """SHA-256 over the bytes of this rank's part of tensors, in the order given."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Take in tensors; a missing one leaves a mark."""
        for tensor in tensors:
            if tensor is None:
                self._hash.update(b"none")
                continue
            part = local(tensor).contiguous()
            self._hash.update(f"{part.dtype}{tuple(part.shape)}".encode())
            self._hash.update(ctypes.string_at(part.data_ptr(), part.nbytes) if part.nbytes else b"")

    def hex(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()
