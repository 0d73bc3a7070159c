"""All-gathers of parameters before the compute that needs them, where the plan owns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from commplan.execute.collectives import group_name, nothing
from commplan.execute.interface import Unit
from commplan.execute.lanes import Task, Token
from commplan.execute.packing import Cut, columns
from commplan.execute.store import Store
from commplan.ops import OpId
from commplan.plan.model import OpStep


@dataclass(slots=True)
class Gathered:
    """What one all-gather brings, all pieces of it, for the units in it that are not needed yet.

    Attributes:
        buffer: shape (ranks * elements that one rank gives,): one piece after another, each one rank after another.
        cut: elements that each unit gives, and how they are cut into pieces.
        last: the end of the last piece that was issued.
    """

    buffer: torch.Tensor
    cut: Cut
    num_ranks: int
    left: dict[int, int]
    last: Token | None = None

    def rows_of(self, place: int) -> torch.Tensor:
        """What all ranks gave for the unit at `place`, shape (ranks, elements)."""
        columns = []
        parts = self.buffer.split([size * self.num_ranks for size in self.cut.sizes])
        for part, lengths in zip(parts, self.cut.lengths, strict=True):
            if lengths[place]:
                columns.append(part.view(self.num_ranks, -1).narrow(1, sum(lengths[:place]), lengths[place]))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


@dataclass(slots=True)
class Gathers:
    """The all-gathers of one backward.

    Attributes:
        units: by the order in which compute needs their parameters.
        wanted: need indices of units whose compute is still to come.
    """

    units: Sequence[Unit]
    wanted: set[int]
    store: Store
    _under_way: dict[int, Gathered] = field(default_factory=dict)

    def prepare(self, step: OpStep) -> Task | None:
        """The all-gather of `step`, or a piece of it; None if it has nothing to do."""
        if step.op.piece > 0:
            return self.store.take_piece(step.op)
        inputs: dict[int, Sequence[torch.Tensor]] = {}
        for need_index in step.op.members:
            given = self.units[need_index].shards_to_gather() if need_index in self.wanted else None
            if given is not None and need_index not in self._under_way:
                inputs[need_index] = given
        if not inputs:
            return None
        units = [self.units[i] for i in inputs]
        group = units[0].group(step.communicator)
        assert group is not None
        tasks = self._tasks(step.op, inputs, units, group)
        self.store.keep_pieces(tasks)
        return self.store.take_piece(step.op)

    def issued(self, op: OpId, token: Token) -> None:
        """The op's task is in its lane."""
        for need_index in op.members:
            if (gathered := self._under_way.get(need_index)) is not None:
                gathered.last = token

    def give(self, need_index: int, wait: Callable[[Sequence[Token]], None]) -> None:
        """Compute of a module is about to begin: make its parameters whole, if this brought them."""
        self.wanted.discard(need_index)
        gathered = self._under_way.pop(need_index, None)
        if gathered is None:
            return
        if gathered.last is not None:
            wait([gathered.last])
        self.units[need_index].set_parameters(gathered.rows_of(gathered.left.pop(need_index)))
        if not gathered.left:
            self.store.memory.give_back(gathered.buffer)

    def drop(self) -> None:
        """Give back what no compute came for; compute must be behind all that was issued."""
        for gathered in {id(one): one for one in self._under_way.values()}.values():
            self.store.memory.give_back(gathered.buffer)
        self._under_way.clear()

    def _tasks(
        self, op: OpId, inputs: dict[int, Sequence[torch.Tensor]], units: Sequence[Unit], group: dist.ProcessGroup
    ) -> Sequence[tuple[OpId, Task]]:
        """Copy this rank's shards into their place, on compute; one task for each piece that holds anything."""
        cut = Cut([sum(shard.numel() for shard in shards) for shards in inputs.values()], op.pieces)
        num_ranks, rank = group.size(), group.rank()
        first = next(iter(inputs.values()))[0]
        buffer = self.store.memory.borrow(sum(cut.numels) * num_ranks, first.dtype, first.device)
        gathered = Gathered(buffer, cut, num_ranks, {need: place for place, need in enumerate(inputs)})
        self._under_way.update(dict.fromkeys(inputs, gathered))
        rows = [[shard.unsqueeze(0) for shard in shards] for shards in inputs.values()]
        name = ", ".join(unit.name for unit in units)
        tasks = []
        parts = buffer.split([size * num_ranks for size in cut.sizes])
        for piece, (part, bounds) in enumerate(zip(parts, cut.bounds, strict=True)):
            if not part.numel():
                continue
            own = part.view(num_ranks, -1)[rank]
            given = [c for of_one, within in zip(rows, bounds, strict=True) for c in columns(of_one, *within)]
            with torch.no_grad():
                torch.cat(given, dim=1, out=own.unsqueeze(0))
            name_of_piece = replace(op, piece=piece)

            def start(part: torch.Tensor = part, own: torch.Tensor = own) -> dist.Work | None:
                return units[0].all_gather(part, own, group)

            around = self.store.around(name_of_piece, name)
            task = Task(str(name_of_piece), name, group_name(group), start, nothing, process_group=group, around=around)
            tasks.append((name_of_piece, task))
        return tasks
