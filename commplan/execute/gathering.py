"""All-gathers of parameters before the compute that needs them, where the plan owns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from commplan.execute.collectives import nothing
from commplan.execute.interface import Unit
from commplan.execute.lanes import Task, Token
from commplan.execute.packing import Cut, columns, without_grad
from commplan.execute.store import Store
from commplan.ops import OpId
from commplan.plan.model import OpStep


@dataclass(slots=True)
class Gathered:
    """What one all-gather brings, all pieces of it, for the units in it that are not needed yet.

    Attributes:
        buffer: shape (ranks * elements that one rank gives,).
        parts: its pieces, in each one rank after another, in that one unit after another.
        cut: elements that each unit gives, and how they are cut into pieces.
        last: the end of the last piece that was issued.
        source: what is sent from where it is, if `buffer` is the unit's own (see `Unit.place_to_gather`); kept until it was.
    """

    buffer: torch.Tensor
    parts: Sequence[torch.Tensor]
    cut: Cut
    num_ranks: int
    left: dict[int, int]
    last: Token | None = None
    source: torch.Tensor | None = None

    @property
    def is_in_place(self) -> bool:
        """Whether nothing is copied."""
        return self.source is not None

    def rows_of(self, place: int) -> torch.Tensor:
        """What all ranks gave for the unit at `place`, shape (ranks, elements)."""
        if len(self.parts) == len(self.cut.numels) == 1:
            return self.buffer.view(self.num_ranks, -1)
        found = []
        for part, lengths in zip(self.parts, self.cut.lengths, strict=True):
            if lengths[place]:
                found.append(part.view(self.num_ranks, -1).narrow(1, sum(lengths[:place]), lengths[place]))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


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
        op = step.op
        if op.piece > 0:
            return self.store.take_piece(op)
        inputs: dict[int, Sequence[torch.Tensor]] = {}
        for need_index in op.members:
            given = self.units[need_index].shards_to_gather() if need_index in self.wanted else None
            if given is not None and need_index not in self._under_way:
                inputs[need_index] = given
        if not inputs:
            return None
        group = self.units[next(iter(inputs))].group(step.communicator)
        assert group is not None
        gathered, own = self._in_place(op, inputs, group) or self._copy_in(op, inputs, group)
        self._under_way.update(dict.fromkeys(inputs, gathered))
        unit, name = self.units[next(iter(inputs))], ", ".join([self.units[i].name for i in inputs])
        for piece, (part, mine) in enumerate(zip(gathered.parts, own, strict=True)):
            if part.numel():
                piece_op = op if piece == op.piece else replace(op, piece=piece)
                words, around = self.store.words(piece_op, name)
                start = partial(unit.all_gather, part, mine, group)
                task = Task(words, name, self.store.group_name(group), start, nothing, process_group=group, around=around)
                self.store.keep_piece(piece_op, task)
        return self.store.take_piece(op)

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
        if not gathered.left and not gathered.is_in_place:
            self.store.memory.give_back(gathered.buffer)

    def drop(self) -> None:
        """Give back what no compute came for; compute must be behind all that was issued."""
        for need_index, gathered in {id(one): (need, one) for need, one in self._under_way.items()}.values():
            if gathered.is_in_place:
                self.units[need_index].leave_place()
            else:
                self.store.memory.give_back(gathered.buffer)
        self._under_way.clear()

    def _in_place(
        self, op: OpId, inputs: Mapping[int, Sequence[torch.Tensor]], group: dist.ProcessGroup
    ) -> tuple[Gathered, Sequence[torch.Tensor]] | None:
        """Nothing is copied where one parameter is gathered as a whole, and its memory can take what comes."""
        (need_index, shards), *others = inputs.items()
        place = self.units[need_index].place_to_gather() if len(shards) == 1 and op.pieces == 1 and not others else None
        if place is None:
            return None
        cut = Cut([shards[0].numel()], 1)
        return Gathered(place, (place,), cut, group.size(), {need_index: 0}, source=shards[0]), shards

    def _copy_in(
        self, op: OpId, inputs: Mapping[int, Sequence[torch.Tensor]], group: dist.ProcessGroup
    ) -> tuple[Gathered, Sequence[torch.Tensor]]:
        """Copy this rank's shards to their places in a new buffer, on compute; the places, one for each piece."""
        cut = Cut([sum(map(torch.Tensor.numel, shards)) for shards in inputs.values()], op.pieces)
        num_ranks, rank = group.size(), group.rank()
        first = next(iter(inputs.values()))[0]
        numel = sum(cut.numels)
        buffer = self.store.memory.borrow(numel * num_ranks, first.dtype, first.device)
        parts = buffer.split([size * num_ranks for size in cut.sizes]) if cut.pieces > 1 else (buffer,)
        gathered = Gathered(buffer, parts, cut, num_ranks, {need: place for place, need in enumerate(inputs)})
        with without_grad():
            if cut.pieces == 1:
                own = [buffer.narrow(0, rank * numel, numel)]
                torch.cat([shard for shards in inputs.values() for shard in shards], out=own[0])
            else:
                own = [part.view(num_ranks, -1)[rank] for part in parts]
                rows = [[shard.unsqueeze(0) for shard in shards] for shards in inputs.values()]
                for mine, bounds in zip(own, cut.bounds, strict=True):
                    given = [c for of_one, within in zip(rows, bounds, strict=True) for c in columns(of_one, *within)]
                    if given:
                        torch.cat(given, dim=1, out=mine.unsqueeze(0))
        return gathered, own
