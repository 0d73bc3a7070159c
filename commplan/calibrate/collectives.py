"""The collectives of a job that are worth measuring: one of each kind, as its units do it, in what sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from commplan.execute.ranks import listed
from commplan.fsdp2.unit import FsdpUnit
from commplan.language.modules import Module
from commplan.ops import ITEMSIZE_BYTES, TRAITS, Axis, Kind

SMALLEST_BYTES: Final = 4096
STEP: Final = 4
"""Each size is so many times the one before."""

BEYOND: Final = (2, 4)
"""Times the model's largest: what an op sends that carries several modules."""

Start = Callable[[], dist.Work | None]


@dataclass(frozen=True)
class Collective:
    """One kind over one axis, as a unit does it; how much of it the largest module of the model sends, and all of them."""

    axis: Axis
    kind: Kind
    dtype: str
    group: dist.ProcessGroup
    largest_bytes: int
    total_bytes: int
    unit: FsdpUnit

    def __str__(self) -> str:
        return f"{self.kind} over the {self.axis} axis"

    @property
    def ranks(self) -> str:
        """Of its process group, in words."""
        return f"{self.axis} group of ranks {listed(dist.get_process_group_ranks(self.group))}"

    @property
    def own_bytes(self) -> int:
        """The largest that is one module's: a whole number of elements for every rank."""
        return self._whole(self.largest_bytes)

    def sizes(self) -> list[int]:
        """From small to the model's largest, and on to what ops send that carry several modules.

        None is near another one: beyond the last two a profile goes on in their direction.
        """
        wanted, size_bytes = [], SMALLEST_BYTES
        while size_bytes <= self.largest_bytes / 2:
            wanted.append(size_bytes)
            size_bytes *= STEP
        wanted.append(self.largest_bytes)
        if self.largest_bytes >= SMALLEST_BYTES:
            wanted += [times * self.largest_bytes for times in BEYOND if times * self.largest_bytes <= self.total_bytes]
        return sorted({self._whole(size) for size in wanted})

    def _whole(self, size_bytes: int) -> int:
        grain_bytes = ITEMSIZE_BYTES[self.dtype] * (1 if self.kind is Kind.ALL_REDUCE else self.group.size())
        return max(grain_bytes, size_bytes // grain_bytes * grain_bytes)

    def prepare(self, size_bytes: int) -> Start:
        """Make buffers for one, on compute; what starts it, any number of times."""
        dtype, num_ranks = getattr(torch, self.dtype), self.group.size()
        whole = torch.zeros(size_bytes // ITEMSIZE_BYTES[self.dtype], dtype=dtype, device=self.unit.device)
        part = whole.new_zeros(whole.numel() // num_ranks)
        reduction = self.unit.partial_reduction(dtype)
        if self.kind is Kind.REDUCE_SCATTER:
            return lambda: self.unit.reduce_scatter(part, whole, self.group, reduction)
        if self.kind is Kind.ALL_GATHER:
            return lambda: self.unit.all_gather(whole, part, self.group)
        return lambda: dist.all_reduce(whole, reduction.replicate_op, self.group, async_op=True)


def collectives(units: Sequence[tuple[FsdpUnit, Module]], notes: list[str]) -> list[Collective]:
    """What there is to measure: on the mesh on which most bytes are reduced, up to the largest module there."""
    bytes_on: dict[tuple[int, ...], int] = {}
    for unit, module in units:
        bytes_on[_ranks(unit)] = bytes_on.get(_ranks(unit), 0) + module.reduced_bytes
    main = max(bytes_on, key=lambda ranks: bytes_on[ranks])
    if len(bytes_on) > 1:
        left_out = [module.name for unit, module in units if _ranks(unit) != main]
        notes.append(
            f"measured on the mesh of most bytes; other meshes ({', '.join(left_out[:3])}, ...) are taken to be like it"
        )
    there = [(unit, module) for unit, module in units if _ranks(unit) == main]
    unit, module = max(there, key=lambda pair: pair[1].reduced_bytes)
    found = []
    for kind, dtype, sizes in (
        (Kind.ALL_GATHER, module.gather_dtype, [m.gathered_bytes for _, m in there]),
        (Kind.REDUCE_SCATTER, module.reduce_dtype, [m.reduced_bytes for _, m in there]),
        (Kind.ALL_REDUCE, module.reduce_dtype, [m.shard_bytes for _, m in there]),
    ):
        axis = TRAITS[kind].axis
        assert axis is not None
        group = unit.group(axis)
        if group is None or group.size() == 1:
            continue
        if kind is Kind.ALL_GATHER and not unit.gathers_by_default:
            notes.append("all_gather was left out: the model brings one of its own")
            continue
        found.append(Collective(axis, kind, dtype, group, max(sizes), sum(sizes), unit))
    return found


def _ranks(unit: FsdpUnit) -> tuple[int, ...]:
    return tuple(rank for axis in Axis if (group := unit.group(axis)) for rank in (-1, *dist.get_process_group_ranks(group)))
