"""How many bytes the collectives of a plan move, and whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commplan.graph.timeline import orders
from commplan.language.modules import Module
from commplan.ops import ITEMSIZE_BYTES, Kind, OpId, piece_bounds
from commplan.plan.model import OpStep, Plan


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


def lies_as_sent(step: OpStep, members: Sequence[Module]) -> bool:
    """Whether what `step` sends and receives is whole in memory in that order and dtype already: one parameter, not cut, alone
    in its op. Where lanes share the memory of compute, as on a CPU, nothing is copied then.
    """
    first, *others = members
    parameters = first.parameters if step.kind is Kind.ALL_GATHER else first.trainable
    if others or step.op.pieces > 1 or len(parameters) != 1 or parameters[0].shard_dim != 0:
        return False
    if step.kind is Kind.ALL_GATHER:
        return True
    is_padded = parameters[0].padded_numel(first.shard_size) != parameters[0].numel
    dtype = step.dtype or first.reduce_dtype
    # What is sent in fp16 is divided before, and autograd's own memory is not written to.
    is_as_computed = dtype == first.gather_dtype and dtype != "float16"
    return step.kind is Kind.REDUCE_SCATTER and not is_padded and is_as_computed


def _gathered_bytes(module: Module, op: OpId) -> int:
    itemsize_bytes = ITEMSIZE_BYTES[module.gather_dtype]
    numel = module.gathered_bytes // itemsize_bytes // module.shard_size
    return _piece(numel, op) * itemsize_bytes * module.shard_size


def _piece(whole: int, op: OpId) -> int:
    begin, end = piece_bounds(whole, op.piece, op.pieces)
    return end - begin
