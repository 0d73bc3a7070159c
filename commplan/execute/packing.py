"""Where the shards of an op lie on the wire: member by member, and if the op is chunked piece by piece.

The wire input of a reduction holds one piece after another, each piece one rank after another, each rank's part one member
after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from commplan.execute.instance import Instance
from commplan.execute.memory import Memory
from commplan.ops import piece_bounds


def without_grad() -> AbstractContextManager[object]:
    """`torch.no_grad()`, which takes microseconds, where gradients are enabled: inside a backward they are not."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


@dataclass(frozen=True)
class Cut:
    """How the shards of `numels` elements of an op's members are cut into `pieces`."""

    numels: Sequence[int]
    pieces: int

    @cached_property
    def bounds(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Piece -> for each member where the piece begins and ends in its shard."""
        return [[piece_bounds(numel, piece, self.pieces) for numel in self.numels] for piece in range(self.pieces)]

    @cached_property
    def lengths(self) -> Sequence[Sequence[int]]:
        """Piece -> its elements of each member."""
        return [[end - begin for begin, end in of_members] for of_members in self.bounds]

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Piece -> its elements of all members."""
        return list(map(sum, self.lengths))


def pack(instances: Sequence[Instance], out: torch.Tensor, cut: Cut, shard_size: int, memory: Memory) -> None:
    """Copy the gradients into `out`, shape (shard_size * elements of all shards,), and let go of them."""
    gradients = [instance.take_gradients() for instance in instances]
    if cut.pieces == 1:
        instances[0].unit.pack([gradient for of_one in gradients for gradient in of_one], out, shard_size)
    else:
        with without_grad():
            rows = [
                [_rows(gradient, numel, shard_size) for gradient, numel in zip(of_one, instance.layout.numels, strict=True)]
                for of_one, instance in zip(gradients, instances, strict=True)
            ]
            for part, bounds in zip(out.split([size * shard_size for size in cut.sizes]), cut.bounds, strict=True):
                if part.numel():
                    within_piece = [c for of_one, within in zip(rows, bounds, strict=True) for c in columns(of_one, *within)]
                    torch.cat(within_piece, dim=1, out=part.view(shard_size, -1))
            del rows
    del gradients
    for instance in instances:
        instance.drop_held(memory)


def _rows(gradient: torch.Tensor, numel: int, shard_size: int) -> torch.Tensor:
    """A whole gradient, one row a rank."""
    flat = gradient.reshape(-1)
    missing = numel * shard_size - flat.numel()
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(shard_size, numel)


def columns(rows: Sequence[torch.Tensor], begin: int, end: int) -> Iterator[torch.Tensor]:
    """What lies from `begin` to `end` in each rank's shard, which is the concatenation of its rows."""
    at = 0
    for of_parameter in rows:
        numel = of_parameter.size(1)
        first, last = max(begin - at, 0), min(end - at, numel)
        if first < last:
            yield of_parameter[:, first:last]
        at += numel


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor over `parts`, flat tensors, if they lie one behind the other in one buffer."""
    first = parts[0]
    if len(parts) == 1:
        return first
    at = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != at:
            return None
        at += part.numel()
    return first.as_strided((at - first.storage_offset(),), (1,))
