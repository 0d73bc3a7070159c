"""A simulated backward in the words of a measured one, and memory over its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from commplan.ops import COMPUTE_LANE
from commplan.plan.model import COMMUNICATION, Backwards, BufferKind
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport
from commplan.simulate.engine import Simulated


@dataclass(frozen=True, slots=True)
class Point:
    """From `begin_s` on, seconds from the begin of backward, `size_bytes` are alive on one rank."""

    begin_s: float
    size_bytes: int


def report(simulated: Simulated) -> BackwardReport:
    """What the executor would report of this backward; its clock begins with the backward."""
    peak_bytes = max((point.size_bytes for point in memory(simulated)), default=0)
    return BackwardReport(
        0.0,
        simulated.duration_s,
        [
            Interval(str(ran.op), ran.lane, ran.begin_s, ran.end_s, ran.issued_s)
            for ran in simulated.ops
            if ran.lane != COMPUTE_LANE
        ],
        [Interval(_why(simulated, stood.number), COMPUTE_LANE, stood.begin_s, stood.end_s) for stood in simulated.waits],
        peak_bytes,
        simulated.plan.peak_bytes,
        plan=simulated.plan,
    )


def memory(
    simulated: Simulated, kinds: Sequence[BufferKind] = COMMUNICATION, backwards: Backwards = Backwards.LAST
) -> list[Point]:
    """Bytes of buffers of `kinds` over time, in the `backwards` meant. The most is what the plan declares for them.

    A buffer is there from when compute reaches the step that makes it until compute is over the one after which it is freed.
    """
    plan = simulated.plan
    most = plan.bytes_by_step(*kinds, backwards=backwards)
    freed: dict[int, int] = defaultdict(int)
    for buffer in plan.buffers:
        if buffer.kind in kinds and buffer.backwards in (Backwards.EVERY, backwards):
            freed[buffer.freed] += buffer.size_bytes
    points: list[Point] = []
    for number, size_bytes in enumerate(most):
        _add(points, simulated.reached_s[number], size_bytes)
        if freed[number]:
            _add(points, simulated.over_s[number], size_bytes - freed[number])
    _add(points, simulated.duration_s, (points[-1].size_bytes if points else 0) - freed[len(most)])
    return points


def _add(points: list[Point], begin_s: float, size_bytes: int) -> None:
    if not points or points[-1].size_bytes != size_bytes:
        points.append(Point(begin_s, size_bytes))


def _why(simulated: Simulated, number: int) -> str:
    """Reports name a wait by the step that waits, but for the end of root."""
    return str(number) if number < len(simulated.over_s) - 1 else ""
