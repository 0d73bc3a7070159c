"""Traces that open in Perfetto and chrome://tracing: processes with tracks of slices, arrows between slices, counters.

The format is Chrome's "Trace Event Format", JSON object form; times in it are microseconds.  What Perfetto makes of it is in
its `src/trace_processor/importers/json`: it cuts times to whole nanoseconds, drops a slice that begins before the one before it
on its thread has ended, and binds an arrow to the last slice that began on its thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

_US_DIGITS: Final = 3
# An arrow belongs to the slice that is open at its time, and at its end a slice no longer is.
_INSIDE_US: Final = 1e-3
# A time in microseconds times 1,000 may lie below the whole number that it stands for, and what is cut then is a nanosecond. A
# duration may lose one: that leaves a gap and no overlap.
_CUT_US: Final = 2.5e-4

Event = dict[str, Any]

# Perfetto puts the name of the value, "bytes", behind that of the counter.
MEMORY: Final = "communication memory"
IN_FLIGHT: Final = "in flight"


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that ran; `details` are shown when it is selected."""

    name: str
    begin_s: float
    end_s: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """One rank, or one schedule.

    Attributes:
        tracks: slices of each track, in the order in which tracks are shown; those of one track do not overlap.
        arrows: (track, place in it) of a slice -> that of one which had to wait for it.
        counters: name -> values in bytes, each from its time on.
    """

    name: str
    tracks: Mapping[str, Sequence[Slice]]
    arrows: Sequence[tuple[tuple[str, int], tuple[str, int]]] = ()
    counters: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


def levels(of: Iterable[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """A counter of what is there from a begin to an end: (begin, end, how much) -> (time, how much from then on)."""
    change: dict[float, float] = defaultdict(float)
    for begin_s, end_s, much in of:
        if end_s > begin_s:
            change[begin_s] += much
            change[end_s] -= much
    level, found = 0.0, []
    for at_s in sorted(change):
        level += change[at_s]
        found.append((at_s, level))
    return found


def trace(processes: Sequence[Process]) -> dict[str, Any]:
    """What a viewer reads, as plain data for `json.dump`."""
    arrow_ids, thread_ids = count(1), count(len(processes) + 1)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            event for pid, process in enumerate(processes, 1) for event in _events(pid, process, arrow_ids, thread_ids)
        ],
    }


def _events(pid: int, process: Process, arrow_ids: Iterator[int], thread_ids: Iterator[int]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process.name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    # A process's main thread, which is shown first, is the one with its number; other numbers are nobody else's.
    thread_of = {track: next(thread_ids) if at else pid for at, track in enumerate(process.tracks)}
    for track, tid in thread_of.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        for one in process.tracks[track]:
            span = {"ts": _at(_us(one.begin_s)), "dur": round(_us(one.end_s) - _us(one.begin_s), _US_DIGITS)}
            yield {"ph": "X", "name": one.name, "pid": pid, "tid": tid, **span, "args": dict(one.details)}
    for (track, place), (later_track, later_place) in process.arrows:
        earlier, later = process.tracks[track][place], process.tracks[later_track][later_place]
        if any(_us(one.begin_s) == _us(one.end_s) for one in (earlier, later)):
            # A viewer would tie it to whatever else is open then.
            continue
        arrow = {"name": "waits for", "cat": "dependency", "id": next(arrow_ids), "pid": pid}
        yield {"ph": "s", "tid": thread_of[track], "ts": _at(_us(earlier.end_s) - _INSIDE_US), **arrow}
        yield {"ph": "f", "bp": "e", "tid": thread_of[later_track], "ts": _at(_us(later.begin_s)), **arrow}
    for name, values in process.counters.items():
        for since_s, value in values:
            yield {"ph": "C", "name": name, "pid": pid, "ts": _at(_us(since_s)), "args": {"bytes": value}}


def _at(us: float) -> float:
    """A time, in whole nanoseconds, as it is written."""
    return round(us + _CUT_US, _US_DIGITS + 2)


def _us(seconds: float) -> float:
    """Whole nanoseconds, so that what ends where another begins does so in the file too."""
    return round(seconds * 1e6, _US_DIGITS)
