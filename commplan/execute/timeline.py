"""When things ran on a device, found out when somebody asks: until then nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from commplan.errors import ExecutionError
from commplan.sight.intervals import Interval


@dataclass(slots=True)
class Span:
    """An op, or a wait of compute (lane "compute"), between two timed events; `issued` is one of compute."""

    op: str
    lane: str
    begin: Any
    end: Any
    issued: Any = None


class Timeline:
    """The spans of one backward.

    Device times are laid on the host's clock when they are first read: an event is recorded on an idle stream and waited
    for, and what the host needed for that is the error of all times, `clock_error_s`.

    Args:
        anchor: a timed event, recorded before every span.
        record: records a new timed event on the stream of compute and returns it.
        timeout_s: how long to wait for the device when times are read.
    """

    def __init__(self, anchor: Any, record: Callable[[], Any], timeout_s: float) -> None:
        self._anchor = anchor
        self._record: Callable[[], Any] | None = record
        self._timeout_s = timeout_s
        self._spans: dict[bool, list[Span]] = {False: [], True: []}
        self._found: dict[bool, tuple[Interval, ...]] = {}
        self.clock_error_s = 0.0

    def add(self, span: Span, *, is_wait: bool = False) -> None:
        """Note a span whose events were, or are about to be, recorded."""
        self._spans[is_wait].append(span)

    @property
    def is_done(self) -> bool:
        """Whether times were read, so that no event is asked again."""
        return self._record is None

    def intervals(self, *, is_wait: bool) -> tuple[Interval, ...]:
        """Ops, or waits of compute; waits for the device to finish them.

        Raises:
            ExecutionError: it does not within the timeout.
        """
        if self._record is not None:
            self._resolve(self._record)
        return self._found[is_wait]

    def _resolve(self, record: Callable[[], Any]) -> None:
        self._await(record())
        before_s = time.perf_counter()
        now = record()
        self._await(now)
        after_s = time.perf_counter()
        # elapsed_time is in milliseconds, a 32-bit float.
        since_anchor_s = self._anchor.elapsed_time(now) / 1e3
        self.clock_error_s = after_s - before_s + since_anchor_s * 2**-24
        zero_s = after_s - since_anchor_s
        for is_wait, spans in self._spans.items():
            self._found[is_wait] = tuple(self._placed(span, zero_s) for span in spans)
        self._spans, self._record, self._anchor = {}, None, None

    def _placed(self, span: Span, zero_s: float) -> Interval:
        def at_s(event: Any) -> float:
            return float(zero_s + self._anchor.elapsed_time(event) / 1e3)

        issued_s = None if span.issued is None else at_s(span.issued)
        return Interval(span.op, span.lane, at_s(span.begin), at_s(span.end), issued_s)

    def _await(self, event: Any) -> None:
        limit_s = time.perf_counter() + self._timeout_s
        while not event.query():
            if time.perf_counter() > limit_s:
                raise ExecutionError(f"the device did not reach the end of a backward within {self._timeout_s:g} s")


class LazyIntervals(Sequence[Interval]):
    """Intervals of a timeline, which are asked of the device when they are first looked at."""

    def __init__(self, timeline: Timeline, *, is_wait: bool) -> None:
        self.timeline = timeline
        self._is_wait = is_wait

    @property
    def clock_error_s(self) -> float:
        """How far the times may be from this rank's clock."""
        return self.timeline.clock_error_s if len(self) else 0.0

    @overload
    def __getitem__(self, at: int) -> Interval: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Interval]: ...
    def __getitem__(self, at: int | slice) -> Interval | Sequence[Interval]:
        """The intervals at a place, in the order in which they were issued."""
        return self.timeline.intervals(is_wait=self._is_wait)[at]

    def __len__(self) -> int:
        """How many there are."""
        return len(self.timeline.intervals(is_wait=self._is_wait))

    def __iter__(self) -> Iterator[Interval]:
        """One after another."""
        return iter(self.timeline.intervals(is_wait=self._is_wait))
