"""What each kind of reduction does. A row of `TASKS` prepares an op when it is issued and returns what its lane is to run.

Every buffer is allocated while preparing, on the thread (on a device: the stream) of compute; what runs on the lane only
writes to those, since memory that a lane allocates would go back to the lane's pool while compute reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
import torch.distributed as dist

from commplan.errors import ExecutionError
from commplan.execute.instance import Instance, PartialSum, add_into, merge_layouts
from commplan.execute.interface import Reduction, Unit
from commplan.execute.lanes import Task
from commplan.execute.packing import Cut, joined, pack
from commplan.execute.store import Store
from commplan.ops import Kind, OpId, piece_bounds
from commplan.plan.model import OpStep

Add = Callable[[int, int], None]
"""Adds to the elements of a shard from the first to the second number what an earlier backward left."""


@dataclass(slots=True)
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


@dataclass(slots=True)
class _Scatter:
    """A reduce-scatter of some reductions, all pieces of it.

    Attributes:
        shards: where each one's result belongs.
        adders: what adds an earlier backward's to it, if there is anything.
        is_copied: results are received elsewhere, and then cast or put into their places.
    """

    unit: Unit
    group: dist.ProcessGroup | None
    reduction: Reduction
    cut: Cut
    shards: Sequence[torch.Tensor]
    adders: Sequence[Add | None]
    is_copied: bool

    def start(self, source: torch.Tensor, out: torch.Tensor) -> dist.Work | None:
        """Begin a piece."""
        reduction = self.reduction
        _divide(source, reduction.predivide)
        if reduction.shard_size > 1:
            assert self.group is not None
            return self.unit.reduce_scatter(out, source, self.group, reduction)
        if reduction.local_divide is None:
            out.copy_(source)
        else:
            torch.div(source, reduction.local_divide, out=out)
        return None

    def finish(self, piece: int, out: torch.Tensor) -> None:
        """Put what was received where it belongs, and add."""
        parts = out.split(self.cut.lengths[piece])
        for shard, (begin, end), part, add in zip(self.shards, self.cut.bounds[piece], parts, self.adders, strict=True):
            if self.is_copied:
                shard[begin:end].copy_(part)
            if add is not None:
                add(begin, end)

    def task(self, op: OpId, instances: Sequence[Instance], source: torch.Tensor, out: torch.Tensor, store: Store) -> Task:
        """What the lane runs for one piece."""
        has_rest = self.is_copied or any(self.adders)
        start = partial(self.start, source, out)
        finish = partial(self.finish, op.piece, out) if has_rest else nothing
        return _collective(op, instances, self.group, start, finish, store)


def reduce_scatter(call: Call, store: Store) -> Task | None:
    """Pack the gradients, reduce-scatter them, add what an earlier backward left."""
    op = call.op
    if op.piece > 0:
        return store.take_piece(op)
    instances = [instance for instance in call.instances if instance.gradients is not None]
    if not instances:
        return None
    unit, reduction = instances[0].unit, _common_reduction(op, instances)
    wire_dtype = call.wire_dtype or reduction.dtype
    shard_size, numels = reduction.shard_size, [instance.layout.numel for instance in instances]
    numel = sum(numels)
    # A sum over different parameters is laid out anew: that takes all of it at once.
    cut = Cut(numels, 1 if op.pieces == 1 or any(map(store.has_other_layout, instances)) else op.pieces)
    source = _as_sent(instances, wire_dtype, cut, store)
    if source is None:
        source = store.memory.allocate(numel * shard_size, wire_dtype, unit.device)
        pack(instances, source, cut, shard_size, store.memory)
    instances[0].inputs.append(source)
    received = result = store.memory.allocate(numel, reduction.dtype, unit.device)
    shards = result.split(numels) if len(numels) > 1 else (result,)
    adders = [_accumulate(instance, shard, store) for instance, shard in zip(instances, shards, strict=True)]
    is_copied = wire_dtype != reduction.dtype or (len(instances) > 1 and cut.pieces > 1)
    if is_copied:
        received = store.copy(op, instances[0], numel, wire_dtype, is_foreseen=call.copies_are_foreseen)
    scatter = _Scatter(unit, unit.group(call.step.communicator), reduction, cut, shards, adders, is_copied)
    if cut.pieces == 1:
        return scatter.task(op, instances, source, received, store)
    sources = source.split([size * shard_size for size in cut.sizes])
    for piece, (part, out) in enumerate(zip(sources, received.split(cut.sizes), strict=True)):
        if out.numel():
            name = replace(op, piece=piece)
            store.keep_piece(name, scatter.task(name, instances, part, out, store))
    return store.take_piece(op)


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
    parts = _parts(call.op, instances)
    numel = sum([part.numel() for part in parts])
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

    words, around = store.words(call.op, instance.unit.name)
    return Task(words, instance.unit.name, "this rank", start, nothing, is_communication=False, around=around)


def _as_sent(instances: Sequence[Instance], dtype: torch.dtype, cut: Cut, store: Store) -> torch.Tensor | None:
    """A lone gradient that lies as it is sent, from now on in memory that counts; None where gradients are to be packed."""
    first, *others = instances
    # Of gradients that waited the plan counts the copy besides: it would declare more than there is.
    is_lone = not others and cut.pieces == 1 and first.held_bytes == 0
    if not store.sends_in_place or not is_lone or first.reduction.predivide not in (None, 1):
        return None
    assert first.gradients is not None
    source = first.gradients.take_as_sent(dtype)
    if source is not None:
        first.gradients = None
        store.memory.hold(source.nbytes)
    return source


def _parts(op: OpId, instances: Sequence[Instance]) -> list[torch.Tensor]:
    """What a piece of an op works on, of each shard."""
    shards = [instance.shard for instance in instances if instance.shard is not None]
    if op.pieces == 1:
        return shards
    bounds = [piece_bounds(shard.numel(), op.piece, op.pieces) for shard in shards]
    return [shard[begin:end] for shard, (begin, end) in zip(shards, bounds, strict=True)]


def _pack_whole(op: OpId, instances: Sequence[Instance], store: Store) -> None:
    """Let the whole gradients of each module be its shard, on compute."""
    reduction = _common_reduction(op, instances)
    numels = [instance.layout.numel for instance in instances]
    whole = store.memory.allocate(sum(numels), reduction.dtype, instances[0].unit.device)
    pack(instances, whole, Cut(numels, 1), 1, store.memory)
    _divide(whole, reduction.predivide)
    _divide(whole, reduction.local_divide)
    for instance, shard in zip(instances, whole.split(numels), strict=True):
        if (add := _accumulate(instance, shard, store)) is not None:
            add(0, shard.numel())
        instance.release_inputs(store.memory)


def _accumulate(instance: Instance, shard: torch.Tensor, store: Store) -> Add | None:
    """Let the instance's shard be `shard`, still to be filled, plus the unit's partial sum.

    Returns:
        What adds the two, for the lane on which `shard` was filled; all at once, where they hold different parameters.  None
        where there is no partial sum.
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
    if previous is None:
        return None

    def add(begin: int, end: int) -> None:
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
    name = ", ".join([instance.unit.name for instance in instances])
    words, around = store.words(op, name)
    return Task(words, name, store.group_name(group), start, finish, process_group=group, around=around)


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
