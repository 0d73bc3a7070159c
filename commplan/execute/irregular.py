"""Reductions that miss their places in the plan, since gradients came late, came twice, or did not come at all.

Their ops go to the lanes that the plan gives them, each behind the one before.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from commplan.execute.backward import Backward
from commplan.execute.instance import Instance, for_narrow_wire
from commplan.execute.interface import Unit
from commplan.execute.issuing import Issuer
from commplan.execute.memory import Memory
from commplan.execute.program import Program
from commplan.execute.store import Store
from commplan.ops import ITEMSIZE_BYTES, Kind
from commplan.plan.model import OpStep


def postpone(backward: Backward, module: int, instance: Instance, program: Program, memory: Memory) -> None:
    """Leave the reduction of a module whose hook has opened to root."""
    backward.late[module] = instance
    instance.hold_gradients(memory)
    backward.held.pop(module, None)
    backward.irregular_bytes += _size_bytes(instance, program.steps_of[module])


def postpone_partial_sums(backward: Backward, units: Sequence[Unit], program: Program, store: Store) -> None:
    """Leave partial sums to root of modules that got no gradients this time, but are to be all-reduced now."""
    sums = store.partial_sums
    for module, unit in enumerate(units):
        keeps = unit.keeps_partial_sum or (module in program.kept_partial and not backward.is_last)
        if unit in sums and module not in backward.live and module not in backward.late and not keeps:
            partial = sums.pop(unit)
            backward.record.append(f"{unit.name}: partial sum of parameters {partial.layout.params}")
            instance = Instance.of_partial_sum(unit, partial)
            if module in program.sends_fp16:
                instance.reduction = for_narrow_wire(unit, instance.reduction)
            postpone(backward, module, instance, program, store.memory)


def run_late(backward: Backward, program: Program, issuer: Issuer) -> None:
    """Run the ops of late modules whose places have passed, in the plan's order. The rest have their places in root."""
    passed = program.first_step[program.root]
    steps = sorted(
        ((number, module, step) for module in backward.late for number, step in program.steps_of[module] if number < passed),
        key=lambda found: found[:2],
    )
    for _, module, step in steps:
        instance = backward.late[module]
        # Compute's waits are not repeated, so what they implied has to be waited for here.
        waits = [backward.tokens[op] for op in step.after if op in backward.tokens]
        last = [] if instance.last is None else [instance.last]
        issuer.issue_alone(backward, step, module, instance, [*waits, *last])
    # Root's waits were thinned out for the plan's order on each lane, in which these ops stand further ahead.
    issuer.wait([i.last for i in backward.late.values() if i.last is not None])
    backward.live.update(backward.late)


def reduce_again(backward: Backward, module: int, instance: Instance, program: Program, issuer: Issuer) -> None:
    """Reduce a module that was reduced already, on the same lanes, at once; `apply_repeated` adds what comes of it."""
    backward.extra.append((module, instance))
    backward.irregular_bytes += _size_bytes(instance, program.steps_of[module])
    _issue(backward, module, instance, program, issuer, {Kind.REDUCE_SCATTER, Kind.ALL_REDUCE})


def apply_repeated(backward: Backward, program: Program, issuer: Issuer) -> None:
    """Add the outcomes of `reduce_again` to `.grad`."""
    for module, instance in backward.extra:
        _issue(backward, module, instance, program, issuer, {Kind.APPLY})


def _issue(
    backward: Backward, module: int, instance: Instance, program: Program, issuer: Issuer, kinds: Container[Kind]
) -> None:
    """Issue ops of one reduction, each behind the one before."""
    for _, step in program.steps_of[module]:
        if step.kind in kinds:
            waits = [] if instance.last is None else [instance.last]
            issuer.issue_alone(backward, step, module, instance, waits)


def _size_bytes(instance: Instance, steps: Iterable[tuple[int, OpStep]]) -> int:
    """Most memory that this reduction takes by itself, copies for the wire apart; a partial sum is not its own. Gradients that
    are held go once they are packed, before there is a shard beside the packed ones.
    """
    if instance.gradients is None:
        return 0
    shard_bytes = instance.layout.numel * instance.reduction.dtype.itemsize
    scatter = next((step for _, step in steps if step.kind is Kind.REDUCE_SCATTER), None)
    if scatter is None:
        return instance.held_bytes + shard_bytes
    itemsize_bytes = instance.reduction.dtype.itemsize if scatter.dtype is None else ITEMSIZE_BYTES[scatter.dtype]
    packed_bytes = instance.layout.numel * instance.reduction.shard_size * itemsize_bytes
    return packed_bytes + max(instance.held_bytes, shard_bytes)
