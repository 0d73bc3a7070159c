"""What ops leave for later ones: live memory, partial sums, whole gradients that wait, pieces that were prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch

from commplan.execute.instance import Instance, PartialSum
from commplan.execute.interface import Unit
from commplan.execute.lanes import Task
from commplan.execute.memory import Memory
from commplan.execute.ranges import Range, no_range, op_range
from commplan.ops import OpId


@dataclass(slots=True)
class Store:
    """What outlives an op.

    Attributes:
        partial_sums: reduced shards that an earlier backward left; and those that this one leaves.
        kept_bytes: whole gradients that wait for a later backward, by unit.
        irregular_bytes: adds up what no plan foresees: sums of partial sums over different parameters, copies of shards that
            do not lie side by side.
    """

    memory: Memory
    partial_sums: dict[Unit, PartialSum] = field(default_factory=dict)
    kept_bytes: dict[Unit, int] = field(default_factory=dict)
    irregular_bytes: int = 0
    make_range: Range = no_range
    _pieces: dict[OpId, Task] = field(default_factory=dict)

    def around(self, op: OpId, module: str) -> Callable[[], AbstractContextManager[object]]:
        """Makes the range that a profiler shows while an op runs."""
        return partial(self.make_range, op_range(op, module))

    def has_other_layout(self, instance: Instance) -> bool:
        """Whether there is a partial sum over other parameters than this reduction has."""
        previous = self.partial_sums.get(instance.unit)
        return previous is not None and previous.layout != instance.layout

    def copy(self, op: OpId, owner: Instance, numel: int, dtype: torch.dtype, *, is_foreseen: bool) -> torch.Tensor:
        """A buffer of shape (numel,) for the wire, which `owner` gives back; `is_foreseen`: the plan counts it."""
        buffer = self.memory.allocate(numel, dtype, owner.unit.device)
        owner.copies.setdefault(op, []).append(buffer)
        if not is_foreseen:
            self.irregular_bytes += buffer.nbytes
        return buffer

    def keep_pieces(self, tasks: Sequence[tuple[OpId, Task]]) -> None:
        """Pieces of an op that were prepared with its first one."""
        self._pieces.update(tasks)

    def take_piece(self, op: OpId) -> Task | None:
        """A piece that was kept; None if it has nothing to do."""
        return self._pieces.pop(op, None)

    def keep_gradients(self, unit: Unit, size_bytes: int) -> None:
        """Count whole gradients that wait, in place of those that waited before."""
        self.memory.hold(size_bytes - self.kept_bytes.get(unit, 0))
        self.kept_bytes[unit] = size_bytes

    def forget(self) -> None:
        """Drop whatever waits for a later op or backward; partial sums have been given back."""
        self.partial_sums.clear()
        self._pieces.clear()
        self.memory.drop(sum(self.kept_bytes.values()))
        self.kept_bytes.clear()
        self.irregular_bytes = 0
