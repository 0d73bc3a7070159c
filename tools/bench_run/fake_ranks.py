"""A job of many ranks of which one exists: collectives end at once and move nothing; the absent ranks say what this one says.

What is measured in it is what the host of one rank does, never a network.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from commplan.execute.streams import DeviceHooks, StreamLanes
from commplan.fsdp2 import torch_private

RANK: Final = 0
WIDTH: Final = 8
NUM_LINEAR: Final = 4

_OF_A_RANK = re.compile(r"/\d+$")


@dataclass(frozen=True)
class Requests:
    """What was asked of a store: how often, how often for the note of some rank, and bytes of keys and values."""

    number: int = 0
    notes_read: int = 0
    moved_bytes: int = 0

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.number + other.number, self.notes_read + other.notes_read, self.moved_bytes + other.moved_bytes)

    def __sub__(self, other: Requests) -> Requests:
        return self + Requests(-other.number, -other.notes_read, -other.moved_bytes)


class EchoStore(dist.Store):
    """A store in which every absent rank has left the note that this one left, and has arrived wherever this one has.

    So this rank is the last to come to each meeting, and does what the last one does.

    Attributes:
        requests: those of this rank, so far.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._notes = dist.HashStore()
        self._num_ranks = num_ranks
        self.requests = Requests()

    def set(self, key: str, value: str | bytes) -> None:
        """See `dist.Store`."""
        self._count(key, value)
        self._notes.set(key, value)

    def get(self, key: str) -> bytes:
        """See `dist.Store`."""
        value = self._notes.get(_OF_A_RANK.sub(f"/{RANK}", key))
        self._count(key, value, notes_read=1 if _OF_A_RANK.search(key) else 0)
        return value

    def add(self, key: str, amount: int) -> int:
        """See `dist.Store`."""
        self._count(key)
        return self._notes.add(key, amount * self._num_ranks if key.endswith("/arrived") else amount)

    def check(self, keys: list[str]) -> bool:
        """See `dist.Store`."""
        self._count("".join(keys))
        return self._notes.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """See `dist.Store`."""
        self._count("".join(keys))
        self._notes.wait(keys, timeout)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `dist.Store`."""
        self._count(key, desired)
        return self._notes.compare_set(key, expected, desired)

    def clone(self) -> EchoStore:
        """See `dist.Store`."""
        return self

    def _count(self, key: str, value: str | bytes = "", notes_read: int = 0) -> None:
        self.requests += Requests(1, notes_read, len(key) + len(value))


@contextlib.contextmanager
def fake_world(num_ranks: int) -> Iterator[EchoStore]:
    """Inside, this process is rank 0 of a job of `num_ranks`, on one thread of torch; `attach` works as in a real one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = EchoStore(num_ranks)
    dist.init_process_group("fake", store=store, rank=RANK, world_size=num_ranks)
    try:
        # Groups that no mesh asks for (gloo's, to compare ranks) would wait for the absent.
        with patch.object(torch_private, "new_group", _new_fake_group):
            yield store
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(num_threads)


_new_group = torch_private.new_group


def _new_fake_group(name: str, ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    return _new_group(name, ranks, "fake", timeout)


def mesh_of(num_replicate: int, num_shard: int) -> DeviceMesh:
    """The mesh of a fake world."""
    return init_device_mesh("cpu", (num_replicate, num_shard), mesh_dim_names=("replicate", "shard"))


class Block(nn.Module):
    """Nine small parameters: four linear layers with bias, and a scale. Its compute is next to nothing but host time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LINEAR))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, WIDTH) -> the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def make_model(num_modules: int, mesh: DeviceMesh | None) -> nn.Module:
    """A chain of blocks; with a mesh each is sharded, and resharded after its forward."""
    model = nn.Sequential(*(Block() for _ in range(num_modules)))
    if mesh is not None:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    """A forward."""
    loss: torch.Tensor = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
    return loss


# A device whose streams are free: what is left is what the host does to drive one.


class _Stream:
    def record_event(self, event: _Event) -> None:
        pass

    def wait_event(self, event: _Event) -> None:
        pass


class _Event:
    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Event) -> float:
        return 0.0


class _IdleDevice:
    """See `torch.cuda`, as lanes see it."""

    def __init__(self) -> None:
        self._home = _Stream()

    def Stream(self, device: torch.device, priority: int = 0) -> _Stream:  # noqa: N802 - torch's name
        return _Stream()

    def Event(self, enable_timing: bool = False) -> _Event:  # noqa: N802 - torch's name
        return _Event()

    def current_stream(self, device: torch.device) -> _Stream:
        return self._home

    def stream(self, stream: _Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def set_device(self, device: torch.device) -> None:
        pass


def free_streams(device: torch.device, timeout_s: float) -> StreamLanes:
    """Lanes as on a GPU, whose streams and events cost nothing; see `commplan.Options.make_lanes`."""
    hooks: Any = DeviceHooks(module=_IdleDevice(), abort=lambda _: None)
    return StreamLanes(device, timeout_s, hooks)
