"""When something ran; and sets of times as lists of spans, ascending and apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Spans = list[tuple[float, float]]


@dataclass(slots=True)
class Interval:
    """One op on its lane, or one wait of compute (lane "compute"); `time.perf_counter` seconds.

    Attributes:
        op: the op's name; of a wait, what was given for `why`.
        issued_s: when compute had reached the point where it was submitted.
    """

    op: str
    lane: str
    begin_s: float
    end_s: float
    issued_s: float | None = None


def spans(intervals: Iterable[Interval]) -> Spans:
    """Begin and end of each."""
    return [(i.begin_s, i.end_s) for i in intervals]


def union(of: Spans) -> Spans:
    """The times that lie in any of the spans, ascending and apart."""
    merged: Spans = []
    for begin, end in sorted(of):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersect(one: Spans, other: Spans) -> Spans:
    """The times that lie in both of two unions."""
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


def length(of: Spans) -> float:
    """Seconds in a union."""
    return sum(end - begin for begin, end in of)
