"""What each kind of op does. A row of `TASKS` prepares an op when it is issued and returns what its lane is to run.

Every buffer is allocated while preparing, on the thread (on a device: the stream) of compute; what runs on the lane only
writes to those, since memory that a lane allocates would go back to the lane's pool while compute reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
import torch.distributed as dist

from commplan.execute.instance import Instance, PartialSum, add_into, merge_layouts
from commplan.execute.interface import Unit
from commplan.execute.lanes import Task
from commplan.execute.memory import Memory
from commplan.execute.ranges import Range, no_range, op_range
from commplan.ops import Kind, OpId


@dataclass(slots=True)
class Store:
    """What outlives an op: live memory, and the partial sums that accumulation keeps between backwards.

    `irregular_bytes` adds up what no plan foresees: sums of partial sums over different parameters.
    """

    memory: Memory
    partial_sums: dict[Unit, PartialSum] = field(default_factory=dict)
    irregular_bytes: int = 0
    make_range: Range = no_range

    def around(self, op: OpId, unit: Unit) -> Callable[[], AbstractContextManager[object]]:
        """Makes the range that a profiler shows while an op runs."""
        return partial(self.make_range, op_range(op, unit.name))


def reduce_scatter(op: OpId, instance: Instance, store: Store) -> Task | None:
    """Pack the gradients, reduce-scatter them, add what an earlier backward left."""
    if instance.gradients is None:
        return None
    unit, reduction, layout = instance.unit, instance.reduction, instance.layout
    packed = store.memory.allocate(layout.numel * reduction.shard_size, reduction.dtype, unit.device)
    instance.pack(store.memory, packed)
    instance.inputs.append(packed)
    shard = store.memory.allocate(layout.numel, reduction.dtype, unit.device)
    add_previous = _accumulate(instance, shard, store)

    def start() -> dist.Work | None:
        _divide(packed, reduction.predivide)
        if reduction.shard_size > 1:
            return unit.reduce_scatter(shard, packed, reduction)
        if reduction.local_divide is None:
            shard.copy_(packed)
        else:
            torch.div(packed, reduction.local_divide, out=shard)
        return None

    group = reduction.shard_group
    return Task(str(op), unit.name, _group_name(group), start, add_previous, process_group=group, around=store.around(op, unit))


def all_reduce(op: OpId, instance: Instance, store: Store) -> Task | None:
    """All-reduce the shard in place; where no reduce-scatter made one, the whole gradients are the shard."""
    reduction = instance.reduction
    if instance.shard is None:
        whole = store.memory.allocate(instance.layout.numel, reduction.dtype, instance.unit.device)
        instance.pack(store.memory, whole)
        _divide(whole, reduction.predivide)
        _divide(whole, reduction.local_divide)
        _accumulate(instance, whole, store)()
        instance.release_inputs(store.memory)
    if not instance.all_reduce:
        return None
    shard = instance.shard
    assert shard is not None

    def start() -> dist.Work | None:
        return dist.all_reduce(shard, reduction.replicate_op, reduction.replicate_group, async_op=True)

    group = reduction.replicate_group
    around = store.around(op, instance.unit)
    return Task(str(op), instance.unit.name, _group_name(group), start, nothing, process_group=group, around=around)


def apply(op: OpId, instance: Instance, store: Store) -> Task | None:
    """Scale and cast the reduced shard; the executor writes it to `.grad` when compute is behind this."""
    if not instance.all_reduce:
        return None
    shard = instance.shard
    assert shard is not None, f"{op}: nothing was reduced"
    dtype = instance.unit.gradient_dtype(instance.layout)
    # It becomes `.grad`, or is added to it at once: not communication memory, and not counted.
    gradient = shard if dtype == shard.dtype else torch.empty_like(shard, dtype=dtype)
    instance.gradient = gradient

    def start() -> None:
        _divide(shard, instance.reduction.postdivide)
        if gradient is not shard:
            gradient.copy_(shard)

    around = store.around(op, instance.unit)
    return Task(str(op), instance.unit.name, "this rank", start, nothing, is_communication=False, around=around)


def _accumulate(instance: Instance, shard: torch.Tensor, store: Store) -> Callable[[], None]:
    """Let the instance's shard be `shard`, still to be filled, plus the unit's partial sum.

    Returns:
        What adds the two, for the lane on which `shard` was filled.
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

    def add() -> None:
        if previous is None:
            return
        if total is not shard:
            total.zero_()
            add_into(total, total_layout, shard, layout)
        add_into(total, total_layout, previous.buffer, previous.layout)

    return add


TASKS: Final[Mapping[Kind, Callable[[OpId, Instance, Store], Task | None]]] = MappingProxyType(
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


def _divide(tensor: torch.Tensor, factor: float | None) -> None:
    if factor is not None and factor != 1:
        tensor.div_(factor)


def _group_name(group: dist.ProcessGroup | None) -> str:
    return "this rank" if group is None else f"the group of ranks {dist.get_process_group_ranks(group)}"
