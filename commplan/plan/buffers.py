"""Communication memory of a plan: what each buffer holds, its size, when it is made and when it may go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from commplan.graph.timeline import orders
from commplan.language.modules import Module, ModuleTable
from commplan.ops import ITEMSIZE_BYTES, Kind, Section, When, piece_bounds
from commplan.plan.model import Backwards, Buffer, BufferKind, Hook, OpStep
from commplan.plan.order import StepOrder


def buffers(hooks: Sequence[Hook], table: ModuleTable, order: StepOrder) -> tuple[Buffer, ...]:
    """Every communication buffer, by birth.

    A gradient is kept past its hook until the op that packs it is issued.  What an op reads or writes lives from its issue
    until compute is known to be behind its last reader.  A reduced shard lives until its apply is.

    Where an op is skipped in all backwards but the last, what it would have read outlives them.  Gradients that are not
    packed are added up in their hook, in one buffer.  A reduced shard that is not all-reduced is a partial sum in the next
    backward, until the next reduce-scatter has run and both are added on its lane.
    """
    ledger = _Ledger.of(hooks, table, order)
    found = [*ledger.gradients(), *ledger.reductions(), *ledger.parameters()]
    return tuple(sorted((b for b in found if b.size_bytes), key=lambda b: (b.born, b.first, list(BufferKind).index(b.kind))))


@dataclass
class _Ledger:
    """The ops of a plan by kind and module; the first piece stands for all of its op."""

    order: StepOrder
    completion: list[Module]
    need: list[Module]
    by_kind: dict[Kind, dict[int, OpStep]]
    hook_end: dict[int, int]
    compute_end: dict[str, int]
    num_steps: int

    @classmethod
    def of(cls, hooks: Sequence[Hook], table: ModuleTable, order: StepOrder) -> _Ledger:
        """Sort the steps of `hooks`."""
        completion, need = orders(table)
        by_kind: dict[Kind, dict[int, OpStep]] = {kind: {} for kind in Kind}
        hook_end: dict[int, int] = {}
        compute_end: dict[str, int] = {}
        number = 0
        for hook in hooks:
            if hook.section is Section.POST_BACKWARD:
                hook_end[hook.n] = number + len(hook.steps)
                compute_end[table.modules[hook.module].name] = number - 1
            for step in hook.steps:
                if isinstance(step, OpStep) and step.op.piece == 0:
                    by_kind[step.kind].update(dict.fromkeys(step.op.members, step))
            number += len(hook.steps)
        modules = table.modules
        return cls(
            order,
            [modules[i] for i in completion],
            [modules[i] for i in need],
            by_kind,
            hook_end,
            compute_end,
            number,
        )

    def ops(self, kind: Kind) -> Iterator[OpStep]:
        """Each op of a kind once."""
        seen: OpStep | None = None
        for step in self.by_kind[kind].values():
            if step is not seen:
                yield step
            seen = step

    def numbers(self, step: OpStep) -> list[int]:
        """The step numbers of the pieces of an op, ascending."""
        op = step.op
        return [self.order.step_of[op if op.piece == piece else replace(op, piece=piece)] for piece in range(op.pieces)]

    def known(self, step: OpStep) -> int:
        """The step after which compute is known to be behind every piece of an op."""
        return max(self.order.known[number] for number in self.numbers(step))

    def gradients(self) -> Iterator[Buffer]:
        """Unsharded gradients that outlive the hook of their module, or the whole backward."""
        for n, module in enumerate(self.completion):
            packed_by = next(
                (
                    self.by_kind[kind][n]
                    for kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.APPLY)
                    if n in self.by_kind[kind]
                ),
                None,
            )
            if packed_by is None:
                continue
            packed = self.numbers(packed_by)[0]
            if _backwards(packed_by) is Backwards.LAST:
                size_bytes = module.accumulated_gradient_bytes
                yield Buffer(BufferKind.GRADIENT, n, n, size_bytes, 0, self.num_steps, Backwards.EARLIER)
                yield Buffer(BufferKind.GRADIENT, n, n, size_bytes, 0, packed, Backwards.LAST)
            elif packed >= self.hook_end[n]:
                yield Buffer(BufferKind.GRADIENT, n, n, module.gradient_bytes, self.hook_end[n], packed)

    def reductions(self) -> Iterator[Buffer]:
        """Inputs, wire copies and results of reduce-scatters and all-reduces."""
        for step in self.ops(Kind.REDUCE_SCATTER):
            wire_bytes = sum(m.reduced_numel * self.itemsize_bytes(m, step) for m in self.members(step))
            yield self.while_running(BufferKind.RS_INPUT, step, wire_bytes)
            yield from self.shard(step)
            if self.casts(step) or self.is_interleaved(step):
                sizes = (m.shard_numel * self.itemsize_bytes(m, step) for m in self.members(step))
                yield self.while_running(BufferKind.WIRE, step, sum(sizes))
        for step in self.ops(Kind.ALL_REDUCE):
            if step.op.first not in self.by_kind[Kind.REDUCE_SCATTER]:
                yield from self.shard(step)
            if self.casts(step) or self.is_interleaved(step) or not self.is_side_by_side(step):
                yield from self.copies(step)

    def parameters(self) -> Iterator[Buffer]:
        """Gathered parameters, until the gradients of their module are complete; without gradients, until the end."""
        for step in self.ops(Kind.ALL_GATHER):
            members = self.members(step)
            born = self.order.step_of[step.op]
            freed = max(born, *(self.compute_end.get(m.name, self.num_steps) for m in members))
            op = step.op
            yield Buffer(BufferKind.PARAMETER, op.first, op.last, sum(m.gathered_bytes for m in members), born, freed)
            if self.casts(step):
                wire = (m.gathered_bytes // ITEMSIZE_BYTES[m.gather_dtype] * self.itemsize_bytes(m, step) for m in members)
                yield self.while_running(BufferKind.WIRE, step, sum(wire))

    def members(self, step: OpStep) -> list[Module]:
        """The modules of an op."""
        modules = self.need if step.kind is Kind.ALL_GATHER else self.completion
        return [modules[n] for n in step.op.members]

    def casts(self, step: OpStep) -> bool:
        """Whether an op sends in another dtype than its module reduces (gathers) in."""
        module = self.members(step)[0]
        own = module.gather_dtype if step.kind is Kind.ALL_GATHER else module.reduce_dtype
        return step.dtype not in (None, own)

    def itemsize_bytes(self, module: Module, step: OpStep) -> int:
        """Bytes of an element on the wire."""
        own = module.gather_dtype if step.kind is Kind.ALL_GATHER else module.reduce_dtype
        return ITEMSIZE_BYTES[step.dtype or own]

    def while_running(self, kind: BufferKind, step: OpStep, size_bytes: int) -> Buffer:
        """A buffer that lives while an op runs, as compute knows it."""
        op = step.op
        return Buffer(kind, op.first, op.last, size_bytes, self.order.step_of[step.op], self.known(step), _backwards(step))

    def is_interleaved(self, step: OpStep) -> bool:
        """Whether a piece of an op is no contiguous part of the shards, since each member has its part of it."""
        return len(step.op.members) > 1 and step.op.pieces > 1

    def is_side_by_side(self, step: OpStep) -> bool:
        """Whether the shards that an all-reduce works on are one buffer: those of one reduce-scatter, or packed by itself."""
        scattered = self.by_kind[Kind.REDUCE_SCATTER]
        return len({scattered[n].op if n in scattered else None for n in step.op.members}) == 1

    def copies(self, step: OpStep) -> Iterator[Buffer]:
        """A copy for each piece of an op."""
        op, members = step.op, self.members(step)
        for piece, number in enumerate(self.numbers(step)):
            bounds = (piece_bounds(m.shard_numel, piece, op.pieces) for m in members)
            size_bytes = sum(end - begin for begin, end in bounds) * self.itemsize_bytes(members[0], step)
            freed = self.order.known[number]
            yield Buffer(BufferKind.WIRE, op.first, op.last, size_bytes, number, freed, _backwards(step))

    def shard(self, step: OpStep) -> Iterator[Buffer]:
        """The result of a reduction, until every member is applied; in backwards without its all-reduce it stays, and is
        there when the next one begins.
        """
        applies = self.by_kind[Kind.APPLY]
        op, born = step.op, self.order.step_of[step.op]
        freed = max(self.known(applies[n]) if n in applies else self.num_steps for n in op.members)
        size_bytes = sum(m.shard_bytes for m in self.members(step))
        kept = [n for n in op.members if self.is_kept(n)] if _backwards(step) is Backwards.EVERY else []
        if not kept:
            yield Buffer(BufferKind.SHARD, op.first, op.last, size_bytes, born, freed, _backwards(step))
            return
        kept_bytes = sum(self.completion[n].shard_bytes for n in kept)
        yield Buffer(BufferKind.PARTIAL, op.first, op.last, kept_bytes, 0, self.known(step))
        yield Buffer(BufferKind.SHARD, op.first, op.last, size_bytes, born, self.num_steps, Backwards.EARLIER)
        yield Buffer(BufferKind.SHARD, op.first, op.last, size_bytes, born, freed, Backwards.LAST)

    def is_kept(self, n: int) -> bool:
        """Whether the reduced shard of module `n` is all-reduced in the last backward only."""
        reduced_by = self.by_kind[Kind.ALL_REDUCE].get(n)
        return reduced_by is not None and _backwards(reduced_by) is Backwards.LAST


def _backwards(step: OpStep) -> Backwards:
    """Those in which an op runs."""
    return Backwards.EVERY if step.when is When.EVERY else Backwards.LAST
