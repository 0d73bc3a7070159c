"""How many bytes the collectives of a plan move, whose, and which of them lie in memory as they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commplan.graph.timeline import orders
from commplan.language.modules import Module
from commplan.ops import ITEMSIZE_BYTES, Kind, OpId, piece_bounds
from commplan.plan.model import BufferKind, OpStep, Plan


def members_of(plan: Plan) -> Callable[[OpStep], list[Module]]:
    """Tells the modules that an op of `plan` covers."""
    table = plan.modules.modules
    completion, need = ([table[index] for index in order] for order in orders(plan.modules))

    def members(step: OpStep) -> list[Module]:
        order = need if step.kind is Kind.ALL_GATHER else completion
        return [order[n] for n in step.op.members]

    return members


def wire_bytes(step: OpStep, members: Sequence[Module]) -> int:
    """Bytes of the whole tensor of a collective, or of a piece of it, on one rank; `members` are the modules in it."""
    if step.kind is Kind.ALL_GATHER:
        return sum(_gathered_bytes(m, step.op) for m in members)
    itemsize_bytes = ITEMSIZE_BYTES[step.dtype or members[0].reduce_dtype]
    ranks = members[0].shard_size if step.kind is Kind.REDUCE_SCATTER else 1
    return sum(_piece(m.shard_numel, step.op) for m in members) * ranks * itemsize_bytes


def is_gathered_in_place(step: OpStep, members: Sequence[Module]) -> bool:
    """Whether an all-gather brings one whole parameter, uncut, which lies as it arrives: nothing is unpacked (unless autograd
    is compiled, where whole parameters lie elsewhere).
    """
    first, *others = members
    return not others and step.op.pieces == 1 and len(first.parameters) == 1 and first.parameters[0].shard_dim == 0


def sent_as_it_lies(plan: Plan) -> Callable[[OpStep], bool]:
    """Tells which reduce-scatters of `plan` need no packing where lanes share the memory of compute, as on a CPU: of one
    gradient, uncut and alone in its op, as its hook finds it, in the order and dtype of the wire, which nothing divides before.
    """
    members = members_of(plan)
    kept = {module for b in plan.buffers if b.kind is BufferKind.GRADIENT for module in range(b.first, b.last + 1)}
    ops = [step for step in plan.steps if isinstance(step, OpStep)]
    # One op in fp16 has all of a module's reductions divided as fp16 needs it.
    divided = {n for step in ops if step.dtype == "float16" for n in step.op.members}

    def is_sent_as_it_lies(step: OpStep) -> bool:
        first, *others = members(step)
        if step.kind is not Kind.REDUCE_SCATTER or others or step.op.pieces > 1 or len(first.trainable) != 1:
            return False
        if step.op.first in kept or step.op.first in divided:
            return False
        parameter, dtype = first.trainable[0], step.dtype or first.reduce_dtype
        is_padded = parameter.padded_numel(first.shard_size) != parameter.numel
        # FSDP2 divides before where sums may overflow, which it takes for granted of any other dtype.
        is_summed = first.reduce_dtype in ("float32", "bfloat16")
        return parameter.shard_dim == 0 and not is_padded and is_summed and dtype == first.gather_dtype

    return is_sent_as_it_lies


def copied_on_lane(plan: Plan) -> Callable[[OpStep], int]:
    """Tells how many bytes of shards each reduction of `plan` copies on its lane, since they do not lie side by side or are
    sent in another dtype: a reduce-scatter what it receives, an all-reduce to what it sends and back.
    """
    members = members_of(plan)
    born = {b.born for b in plan.buffers if b.kind is BufferKind.WIRE}
    copying = {
        (step.kind, step.op.first, step.op.last)
        for number, step in enumerate(plan.steps)
        if number in born and isinstance(step, OpStep) and step.kind is not Kind.ALL_GATHER
    }

    def copied_bytes(step: OpStep) -> int:
        if (step.kind, step.op.first, step.op.last) not in copying:
            return 0
        shards = sum(_piece(m.shard_numel, step.op) * ITEMSIZE_BYTES[m.reduce_dtype] for m in members(step))
        return shards if step.kind is Kind.REDUCE_SCATTER else 2 * shards

    return copied_bytes


def _gathered_bytes(module: Module, op: OpId) -> int:
    itemsize_bytes = ITEMSIZE_BYTES[module.gather_dtype]
    numel = module.gathered_bytes // itemsize_bytes // module.shard_size
    return _piece(numel, op) * itemsize_bytes * module.shard_size


def _piece(whole: int, op: OpId) -> int:
    begin, end = piece_bounds(whole, op.piece, op.pieces)
    return end - begin
