"""What happened in one backward: when each op ran, when compute stood still, how much memory was alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from commplan.execute.lanes import Interval

Spans = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class BackwardReport:
    """One backward of one rank; times are `time.perf_counter` seconds, from its first hook to the end of root.

    Attributes:
        ops: collectives as they ran, an op waiting for its peers included.
        compute_waits: when compute stood still for communication.
        peak_bytes: most communication memory alive at once.
        declared_peak_bytes: what the plan says, with the partial sums that accumulation keeps.
    """

    begin_s: float
    end_s: float
    ops: tuple[Interval, ...]
    compute_waits: tuple[Interval, ...]
    peak_bytes: int
    declared_peak_bytes: int

    def exposed_s(self, lane: str | None = None) -> float:
        """Seconds in which a collective (of `lane`) ran while compute stood still."""
        return _length(_intersect(self._busy(lane), _union(_spans(self.compute_waits))))

    def hidden_s(self, lane: str | None = None) -> float:
        """Seconds in which a collective (of `lane`) ran while compute went on."""
        return _length(self._busy(lane)) - self.exposed_s(lane)

    def _busy(self, lane: str | None) -> Spans:
        return _union(_spans(i for i in self.ops if lane is None or i.lane == lane))


def _spans(intervals: Iterable[Interval]) -> Spans:
    return [(i.begin_s, i.end_s) for i in intervals]


def _union(spans: Spans) -> Spans:
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _intersect(one: Spans, other: Spans) -> Spans:
    shared: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            shared.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
