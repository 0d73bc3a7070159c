"""A plan that waits for what never begins is told so."""

from __future__ import annotations

from dataclasses import replace

import pytest

import commplan
from commplan.ops import OpId
from commplan.plan.model import OpStep, Plan, WaitStep
from commplan.simulate import Costs, DeadlockError, OpCost, simulate


def changed(plan: Plan, op: str, waits: tuple[str, ...]) -> Plan:
    """`plan` with an op that waits for others."""
    hooks = []
    for hook in plan.hooks:
        steps = [
            replace(s, waits=tuple(map(OpId.parse, waits))) if isinstance(s, OpStep) and str(s.op) == op else s
            for s in hook.steps
        ]
        hooks.append(replace(hook, steps=tuple(steps)))
    return replace(plan, hooks=tuple(hooks))


def costs(plan: Plan) -> Costs:
    return Costs([1] * len(plan.modules), {step.op: OpCost(latency_s=1) for step in plan.steps if isinstance(step, OpStep)})


def test_two_ops_that_wait_for_each_other() -> None:
    plan = commplan.compile("overlapped_allreduce", 3)
    stuck = changed(plan, "RS_1", ("AR_1",))
    with pytest.raises(
        DeadlockError, match=r"deadlock.*RS_1 on lane 'shard' waits for AR_1.*AR_1 on lane 'replicate' waits for RS_1"
    ):
        simulate(stuck, costs(stuck))


def test_compute_that_waits_for_a_later_op() -> None:
    plan = commplan.compile("overlapped_allreduce", 3)
    first = plan.hooks[0]
    wait = (OpId("RS", 2),)
    stuck = replace(plan, hooks=(replace(first, steps=(WaitStep(wait, wait), *first.steps)), *plan.hooks[1:]))
    with pytest.raises(DeadlockError, match="compute waits for RS_2"):
        simulate(stuck, costs(stuck))
