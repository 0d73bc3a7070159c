"""What ops leave for later ones: live memory, partial sums, whole gradients that wait, pieces that were prepared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from commplan.execute.instance import Instance, PartialSum
from commplan.execute.interface import Unit
from commplan.execute.lanes import Task
from commplan.execute.memory import Memory
from commplan.execute.ranges import Range, no_range, op_range
from commplan.ops import OpId

Words = tuple[str, Callable[[], AbstractContextManager[object]]]


@dataclass(slots=True)
class Store:
    """What outlives an op.

    Attributes:
        partial_sums: reduced shards that an earlier backward left; and those that this one leaves.
        kept_bytes: whole gradients that wait for a later backward, by unit.
        irregular_bytes: adds up what no plan foresees: sums of partial sums over different parameters, copies of shards that
            do not lie side by side.
        sends_in_place: a reduce-scatter may read a gradient where autograd left it. Where lanes are streams it may not: that
            memory belongs to whatever stream computed it.
    """

    memory: Memory
    partial_sums: dict[Unit, PartialSum] = field(default_factory=dict)
    kept_bytes: dict[Unit, int] = field(default_factory=dict)
    irregular_bytes: int = 0
    make_range: Range = no_range
    sends_in_place: bool = False
    _pieces: dict[OpId, Task] = field(default_factory=dict)
    _words: dict[tuple[OpId, str], Words] = field(default_factory=dict)
    _group_names: dict[dist.ProcessGroup | None, str] = field(default_factory=dict)

    def words(self, op: OpId, module: str) -> Words:
        """The name of an op, and what makes the range that a profiler shows while it runs."""
        found = self._words.get((op, module))
        if found is None:
            found = self._words[op, module] = str(op), partial(self.make_range, op_range(op, module))
        return found

    def group_name(self, group: dist.ProcessGroup | None) -> str:
        """A process group in words."""
        found = self._group_names.get(group)
        if found is None:
            found = "this rank" if group is None else f"the group of ranks {dist.get_process_group_ranks(group)}"
            self._group_names[group] = found
        return found

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

    def keep_piece(self, op: OpId, task: Task) -> None:
        """A piece of an op, prepared with its first one."""
        self._pieces[op] = task

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
