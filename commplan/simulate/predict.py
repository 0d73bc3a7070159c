"""A simulated backward in the words of a measured one, and memory over its time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate

from commplan.ops import COMPUTE_LANE, When
from commplan.plan.buffers import buffers as make_buffers
from commplan.plan.instants import bytes_by_step
from commplan.plan.model import COMMUNICATION, Backwards, Buffer, BufferKind, OpStep, Plan
from commplan.plan.order import step_order
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport, fsdp2_gather
from commplan.simulate.engine import Ran, Simulated, Stood


@dataclass(frozen=True, slots=True)
class Point:
    """From `begin_s` on, seconds from the begin of backward, `size_bytes` are alive on one rank."""

    begin_s: float
    size_bytes: int


def report(simulated: Simulated) -> BackwardReport:
    """What the executor would report of this backward, the only one of its step; its clock begins with the backward."""
    steps = simulated.plan.steps
    ran = [ran for ran in simulated.ops if isinstance(step := steps[ran.number], OpStep) and step.communicator]
    peak_bytes = max((point.size_bytes for point in memory(simulated)), default=0)
    return BackwardReport(
        0.0,
        simulated.duration_s,
        [Interval(str(op.op), op.lane, op.begin_s, op.end_s, op.issued_s) for op in ran],
        [Interval(_why(simulated, stood), COMPUTE_LANE, stood.begin_s, stood.end_s) for stood in simulated.waits],
        peak_bytes,
        peak_bytes,
        plan=simulated.plan,
    )


def memory(simulated: Simulated, kinds: Collection[BufferKind] = COMMUNICATION) -> list[Point]:
    """Bytes of buffers of `kinds` over time, in a step of one backward. The most is what the plan declares for such a step.

    A buffer is there from when compute reaches the step that makes it until compute is over the one after which it is freed.
    Gradients are gone before what they are packed into is made (`commplan.plan.instants`).
    """
    plan = simulated.plan
    buffers = [buffer for buffer in _of_one_backward(plan) if buffer.kind in kinds]
    change = [0] * (len(plan.steps) + 1)
    for buffer in buffers:
        change[buffer.born] += buffer.size_bytes
        change[buffer.freed] -= buffer.size_bytes
    points = [Point(0, 0)]
    most = bytes_by_step(plan.steps, buffers)[: len(plan.steps)]
    for number, (size_bytes, left_bytes) in enumerate(zip(most, accumulate(change), strict=False)):
        _add(points, simulated.reached_s[number], size_bytes)
        _add(points, simulated.over_s[number], left_bytes)
    _add(points, simulated.duration_s, 0)
    return points


def _of_one_backward(plan: Plan) -> tuple[Buffer, ...]:
    """The buffers of a step of one backward, in which nothing is left to a later one."""
    if all(buffer.backwards is Backwards.EVERY for buffer in plan.buffers):
        return plan.buffers
    hooks = [
        replace(hook, steps=tuple(replace(s, when=When.EVERY) if isinstance(s, OpStep) else s for s in hook.steps))
        for hook in plan.hooks
    ]
    return make_buffers(hooks, plan.modules, step_order(hooks))


def limits(simulated: Simulated) -> list[str]:
    """For each of the ops that ran, in words, what it could not begin before."""
    steps = simulated.plan.steps
    over_s = {ran.op: ran.end_s for ran in simulated.ops}
    before: dict[str, Ran] = {}
    found = []
    for ran in sorted(simulated.ops, key=lambda one: one.number):
        step = steps[ran.number]
        reasons = [(ran.issued_s, "it was issued")]
        if (previous := before.get(ran.lane)) is not None:
            reasons.append((previous.end_s, f"{previous.op} on its lane"))
        reasons += [(over_s[op], f"{op}, which it waits for") for op in step.waits]
        before[ran.lane] = ran
        # Of several at one moment the first: what was issued late enough was held up by nothing else.
        found.append((ran, max(reasons, key=lambda reason: reason[0])[1]))
    of = dict(found)
    return [of[ran] for ran in simulated.ops]


def _add(points: list[Point], begin_s: float, size_bytes: int) -> None:
    if not points or points[-1].size_bytes != size_bytes:
        points.append(Point(begin_s, size_bytes))


def _why(simulated: Simulated, stood: Stood) -> str:
    """As reports name a wait."""
    if stood.number < 0:
        return fsdp2_gather(simulated.plan.modules.modules[stood.module].name)
    return str(stood.number) if stood.number < len(simulated.plan.steps) else ""
