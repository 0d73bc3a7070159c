"""What each kind of reduction does. A row of `TASKS` prepares an op when it is issued and returns what its lane is to run.

Every buffer is allocated while preparing, on the thread (on a device: the stream) of compute; what runs on the lane only
writes to those, since memory that a lane allocates would go back to the lane's pool while compute reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
import torch.distributed as dist

from commplan.errors import ExecutionError
from commplan.execute.instance import Instance, PartialSum, add_into, merge_layouts
from commplan.execute.interface import Reduction
from commplan.execute.lanes import Task
from commplan.execute.packing import Cut, joined, pack
from commplan.execute.store import Store
from commplan.ops import Kind, OpId, piece_bounds
from commplan.plan.model import OpStep

Add = Callable[[int, int], None]
"""Adds to the elements of a shard from the first to the second number what an earlier backward left."""


@dataclass(frozen=True, slots=True)
class Call:
    """One op, or one piece of it, with the reductions that take part in it in this backward, in the order of the plan.

    Attributes:
        wire_dtype: what is sent; None for the dtype of the reduction.
        copies_are_foreseen: the plan counts the copy that this op may make.
    """

    step: OpStep
    instances: Sequence[Instance]
    wire_dtype: torch.dtype | None = None
    copies_are_foreseen: bool = False

    @property
    def op(self) -> OpId:
        """The name of the op."""
        return self.step.op


def reduce_scatter(call: Call, store: Store) -> Task | None:
    """Pack the gradients, reduce-scatter them, add what an earlier backward left."""
    if call.op.piece > 0:
        return store.take_piece(call.op)
    instances = [instance for instance in call.instances if instance.gradients is not None]
    if not instances:
        return None
    reduction = _common_reduction(call.op, instances)
    wire_dtype = call.wire_dtype or reduction.dtype
    shard_size, numels = reduction.shard_size, [instance.layout.numel for instance in instances]
    # A sum over different parameters is laid out anew: that takes all of it at once.
    pieces = 1 if any(map(store.has_other_layout, instances)) else call.op.pieces
    cut = Cut(numels, pieces)
    packed = store.memory.allocate(sum(numels) * shard_size, wire_dtype, instances[0].unit.device)
    pack(instances, packed, cut, shard_size, store.memory)
    instances[0].inputs.append(packed)
    result = store.memory.allocate(sum(numels), reduction.dtype, packed.device)
    shards = result.split(numels)
    adders = [_accumulate(instance, shard, store) for instance, shard in zip(instances, shards, strict=True)]
    received = result
    if is_copied := wire_dtype != reduction.dtype or (len(instances) > 1 and pieces > 1):
        received = store.copy(call.op, instances[0], sum(numels), wire_dtype, is_foreseen=call.copies_are_foreseen)
    group = instances[0].unit.group(call.step.communicator)

    def task(piece: int, source: torch.Tensor, out: torch.Tensor) -> Task:
        def start() -> dist.Work | None:
            _divide(source, reduction.predivide)
            if reduction.shard_size > 1:
                assert group is not None
                return instances[0].unit.reduce_scatter(out, source, group, reduction)
            if reduction.local_divide is None:
                out.copy_(source)
            else:
                torch.div(source, reduction.local_divide, out=out)
            return None

        def finish() -> None:
            parts = out.split(cut.lengths[piece])
            for shard, (begin, end), part, add in zip(shards, cut.bounds[piece], parts, adders, strict=True):
                if is_copied:
                    shard[begin:end].copy_(part)
                add(begin, end)

        return _collective(replace(call.op, piece=piece), instances, group, start, finish, store)

    if pieces == 1:
        return task(0, packed, received)
    sources = packed.split([size * shard_size for size in cut.sizes])
    cuts = zip(range(pieces), sources, received.split(cut.sizes), strict=True)
    tasks = [(replace(call.op, piece=piece), task(piece, source, out)) for piece, source, out in cuts if out.numel()]
    store.keep_pieces(tasks)
    return store.take_piece(call.op)


def all_reduce(call: Call, store: Store) -> Task | None:
    """All-reduce the shards, in place where they lie side by side; where no reduce-scatter made one, the whole gradients are
    the shard.
    """
    fresh = [instance for instance in call.instances if instance.shard is None and instance.gradients is not None]
    if fresh:
        _pack_whole(call.op, fresh, store)
    instances = [instance for instance in call.instances if instance.all_reduce and instance.shard is not None]
    if not instances:
        return None
    reduction = _common_reduction(call.op, instances)
    wire_dtype = call.wire_dtype or reduction.dtype
    parts = []
    for instance in instances:
        assert instance.shard is not None
        begin, end = piece_bounds(instance.layout.numel, call.op.piece, call.op.pieces)
        parts.append(instance.shard if call.op.pieces == 1 else instance.shard[begin:end])
    numel = sum(part.numel() for part in parts)
    if numel == 0 and call.op.pieces > 1:
        return None
    in_place = joined(parts) if wire_dtype == reduction.dtype else None
    wire = in_place
    if wire is None:
        wire = store.copy(call.op, instances[0], numel, wire_dtype, is_foreseen=call.copies_are_foreseen)
    group = instances[0].unit.group(call.step.communicator)

    def start() -> dist.Work | None:
        if in_place is None:
            torch.cat(parts, out=wire)
        return dist.all_reduce(wire, reduction.replicate_op, group, async_op=True)

    def finish() -> None:
        for part, copy in zip(parts, wire.split([part.numel() for part in parts]), strict=True):
            part.copy_(copy)

    return _collective(call.op, instances, group, start, nothing if in_place is not None else finish, store)


def apply(call: Call, store: Store) -> Task | None:
    """Scale and cast the reduced shard; the executor writes it to `.grad` when compute is behind this."""
    (instance,) = call.instances
    if not instance.all_reduce:
        return None
    shard = instance.shard
    assert shard is not None, f"{call.op}: nothing was reduced"
    dtype = instance.unit.gradient_dtype(instance.layout)
    # It becomes `.grad`, or is added to it at once: not communication memory, and not counted.
    gradient = shard if dtype == shard.dtype else torch.empty_like(shard, dtype=dtype)
    instance.gradient = gradient

    def start() -> None:
        _divide(shard, instance.reduction.postdivide)
        if gradient is not shard:
            gradient.copy_(shard)

    name = instance.unit.name
    around = store.around(call.op, name)
    return Task(str(call.op), name, "this rank", start, nothing, is_communication=False, around=around)


def _pack_whole(op: OpId, instances: Sequence[Instance], store: Store) -> None:
    """Let the whole gradients of each module be its shard, on compute."""
    reduction = _common_reduction(op, instances)
    numels = [instance.layout.numel for instance in instances]
    whole = store.memory.allocate(sum(numels), reduction.dtype, instances[0].unit.device)
    pack(instances, whole, Cut(numels, 1), 1, store.memory)
    _divide(whole, reduction.predivide)
    _divide(whole, reduction.local_divide)
    for instance, shard in zip(instances, whole.split(numels), strict=True):
        _accumulate(instance, shard, store)(0, shard.numel())
        instance.release_inputs(store.memory)


def _accumulate(instance: Instance, shard: torch.Tensor, store: Store) -> Add:
    """Let the instance's shard be `shard`, still to be filled, plus the unit's partial sum.

    Returns:
        What adds the two, for the lane on which `shard` was filled; all at once, where they hold different parameters.
    """
    layout = instance.layout
    instance.shard = shard
    previous = store.partial_sums.pop(instance.unit, None)
    if previous is not None:
        instance.inputs.append(previous.buffer)
        if previous.layout != layout:
            instance.inputs.append(shard)
            instance.layout = merge_layouts(previous.layout, layout)
            instance.shard = store.memory.allocate(instance.layout.numel, shard.dtype, shard.device)
            store.irregular_bytes += instance.shard.nbytes
    total, total_layout = instance.shard, instance.layout
    if not instance.all_reduce:
        store.partial_sums[instance.unit] = PartialSum(total_layout, total)

    def add(begin: int, end: int) -> None:
        if previous is None:
            return
        if total is not shard:
            total.zero_()
            add_into(total, total_layout, shard, layout)
            add_into(total, total_layout, previous.buffer, previous.layout)
        else:
            total[begin:end].add_(previous.buffer[begin:end])

    return add


TASKS: Final[Mapping[Kind, Callable[[Call, Store], Task | None]]] = MappingProxyType(
    {
        Kind.REDUCE_SCATTER: reduce_scatter,
        Kind.ALL_REDUCE: all_reduce,
        Kind.APPLY: apply,
    }
)
"""Kind -> how to prepare an op of it. None means that there is nothing to do in this backward."""


def placeholder(op: OpId) -> Task:
    """Holds the place of an op that has nothing to do."""
    return Task(str(op), "", "", nothing, nothing, is_communication=False)


def nothing() -> None:
    """The body of an op without work."""


def _collective(
    op: OpId,
    instances: Sequence[Instance],
    group: dist.ProcessGroup | None,
    start: Callable[[], dist.Work | None],
    finish: Callable[[], None],
    store: Store,
) -> Task:
    name = ", ".join(instance.unit.name for instance in instances)
    return Task(str(op), name, group_name(group), start, finish, process_group=group, around=store.around(op, name))


def _common_reduction(op: OpId, instances: Sequence[Instance]) -> Reduction:
    """How all of them are reduced."""
    first, *others = instances
    for other in others:
        if other.reduction != first.reduction:
            raise ExecutionError(
                f"{op} reduces modules {first.unit.name!r} and {other.unit.name!r} together, but FSDP2 was told to reduce them "
                "differently since the schedule was attached (gradient divide factor, forced sums): set it before attach"
            )
    return first.reduction


def _divide(tensor: torch.Tensor, factor: float | None) -> None:
    if factor is not None and factor != 1:
        tensor.div_(factor)


def group_name(group: dist.ProcessGroup | None) -> str:
    """A process group in words."""
    return "this rank" if group is None else f"the group of ranks {dist.get_process_group_ranks(group)}"
