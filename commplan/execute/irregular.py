"""Reductions that miss their places in the plan, since gradients came late, came twice, or did not come at all.

Their ops go to the lanes that the plan gives them, each behind the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from commplan.execute.backward import Backward
from commplan.execute.collectives import Store
from commplan.execute.instance import Instance
from commplan.execute.interface import Unit
from commplan.execute.issuing import Issuer
from commplan.execute.memory import Memory
from commplan.execute.program import Program
from commplan.ops import Kind
from commplan.plan.model import OpStep


def postpone(backward: Backward, module: int, instance: Instance, memory: Memory) -> None:
    """Leave the reduction of a module whose hook has opened to root."""
    backward.late[module] = instance
    instance.hold_gradients(memory)
    backward.irregular_bytes += instance.size_bytes


def postpone_partial_sums(backward: Backward, units: Sequence[Unit], store: Store) -> None:
    """Leave partial sums to root of modules that got no gradients this time, but are to be all-reduced now."""
    sums = store.partial_sums
    for module, unit in enumerate(units):
        if unit in sums and module not in backward.live and module not in backward.late and not unit.keeps_partial_sum:
            partial = sums.pop(unit)
            backward.record.append(f"{unit.name}: partial sum of parameters {partial.layout.params}")
            postpone(backward, module, Instance.of_partial_sum(unit, partial), store.memory)


def run_late(backward: Backward, program: Program, issuer: Issuer) -> None:
    """Run the ops of late modules whose places have passed, in the plan's order. The rest have their places in root."""
    passed = program.first_step[program.root]
    steps = sorted((s for m in backward.late for s in program.steps_of[m] if s[0] < passed), key=lambda s: s[0])
    for _, step in steps:
        instance = backward.late[step.op.first]
        # Compute's waits are not repeated, so what they implied has to be waited for here.
        waits = [backward.tokens[op] for op in step.after if op in backward.tokens]
        issuer.issue(backward, step, instance, waits if instance.last is None else [*waits, instance.last])
    # Root's waits were thinned out for the plan's order on each lane, in which these ops stand further ahead.
    issuer.wait([i.last for i in backward.late.values() if i.last is not None])
    backward.live.update(backward.late)


def reduce_again(backward: Backward, module: int, instance: Instance, program: Program, issuer: Issuer) -> None:
    """Reduce a module that was reduced already, on the same lanes, at once; `apply_repeated` adds what comes of it."""
    backward.extra.append((module, instance))
    backward.irregular_bytes += instance.size_bytes
    _issue(backward, _steps(program, module, {Kind.REDUCE_SCATTER, Kind.ALL_REDUCE}), instance, issuer)


def apply_repeated(backward: Backward, program: Program, issuer: Issuer) -> None:
    """Add the outcomes of `reduce_again` to `.grad`."""
    for module, instance in backward.extra:
        _issue(backward, _steps(program, module, {Kind.APPLY}), instance, issuer)


def _steps(program: Program, module: int, kinds: set[Kind]) -> Iterator[OpStep]:
    return (step for _, step in program.steps_of[module] if step.kind in kinds)


def _issue(backward: Backward, steps: Iterable[OpStep], instance: Instance, issuer: Issuer) -> None:
    """Issue ops of one reduction, each behind the one before."""
    for step in steps:
        issuer.issue(backward, step, instance, [] if instance.last is None else [instance.last])
