"""A simulated backward in the words of a measured one, and memory over its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from commplan.ops import COMPUTE_LANE
from commplan.plan.model import COMMUNICATION, Backwards, BufferKind
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport
from commplan.simulate.engine import Ran, Simulated


@dataclass(frozen=True, slots=True)
class Point:
    """From `begin_s` on, seconds from the begin of backward, `size_bytes` are alive on one rank."""

    begin_s: float
    size_bytes: int


ONE_BACKWARD: Final = tuple(kind for kind in COMMUNICATION if kind is not BufferKind.PARTIAL)
"""What is there in a step of one backward, which finds no partial sums."""


def report(simulated: Simulated) -> BackwardReport:
    """What the executor would report of this backward, the only one of its step; its clock begins with the backward."""
    ran = [ran for ran in simulated.ops if ran.lane != COMPUTE_LANE]
    return BackwardReport(
        0.0,
        simulated.duration_s,
        [Interval(str(op.op), op.lane, op.begin_s, op.end_s, op.issued_s) for op in ran],
        [Interval(_why(simulated, stood.number), COMPUTE_LANE, stood.begin_s, stood.end_s) for stood in simulated.waits],
        max((point.size_bytes for point in memory(simulated)), default=0),
        simulated.plan.peak_bytes,
        plan=simulated.plan,
    )


def memory(simulated: Simulated, kinds: Sequence[BufferKind] = ONE_BACKWARD) -> list[Point]:
    """Bytes of buffers of `kinds` over time, in the last backward of a step. The most is what the plan declares for them.

    A buffer is there from when compute reaches the step that makes it until compute is over the one after which it is freed.
    """
    plan = simulated.plan
    most = plan.bytes_by_step(*kinds, backwards=Backwards.LAST)
    freed: dict[int, int] = defaultdict(int)
    for buffer in plan.buffers:
        if buffer.kind in kinds and buffer.backwards in (Backwards.EVERY, Backwards.LAST):
            freed[buffer.freed] += buffer.size_bytes
    points: list[Point] = []
    for number, size_bytes in enumerate(most):
        _add(points, simulated.reached_s[number], size_bytes)
        if freed[number]:
            _add(points, simulated.over_s[number], size_bytes - freed[number])
    _add(points, simulated.duration_s, (points[-1].size_bytes if points else 0) - freed[len(most)])
    return points


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


def _why(simulated: Simulated, number: int) -> str:
    """Reports name a wait by the step that waits, but for the end of root."""
    return str(number) if number < len(simulated.over_s) - 1 else ""
