"""What Perfetto makes of a trace in JSON: a model of `src/trace_processor/importers/json` and `common/slice_tracker.cc` there.

Times are cut to whole nanoseconds; events are taken in the order of their times, those of one time as they stand in the file.
Slices of a thread are a stack: what has ended is taken off when another begins, and one that begins inside another and ends
behind it is dropped. An arrow begins and ends (`bp` "e") at the slice on top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shown:
    """A slice; nanoseconds."""

    thread: int
    name: str
    begin_ns: int
    end_ns: int
    depth: int


@dataclass
class Opened:
    """What is there to see.

    Attributes:
        threads, processes: names by number.
        arrows: from one slice to another.
        counters: values by process and name.
        lost: slices that were dropped, and arrows that have nothing to bind to.
    """

    slices: list[Shown] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    arrows: list[tuple[Shown, Shown]] = field(default_factory=list)
    counters: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: list[Any] = field(default_factory=list)


def open_trace(trace: dict[str, Any]) -> Opened:
    """Read a trace that was read from JSON."""
    found = Opened()
    stacks: dict[int, list[Shown]] = defaultdict(list)
    begun: dict[int, Shown] = {}
    for event in sorted(trace["traceEvents"], key=lambda event: _ns(event.get("ts", 0))):
        thread = event.get("tid", event["pid"])
        stack = stacks[thread]
        if event["ph"] == "M":
            names = {"thread_name": (found.threads, thread), "process_name": (found.processes, event["pid"])}
            if event["name"] in names:
                of, number = names[event["name"]]
                assert number not in of, "a number stands for two"
                of[number] = event["args"]["name"]
        elif event["ph"] == "X":
            begin_ns = _ns(event["ts"])
            _begin(found, stack, Shown(thread, event["name"], begin_ns, begin_ns + _ns(event["dur"]), 0))
        elif event["ph"] == "C":
            for name, value in event["args"].items():
                found.counters[event["pid"], f"{event['name']} {name}"].append(value)
        elif event["ph"] == "s" and stack:
            begun[event["id"]] = stack[-1]
        elif event["ph"] == "f" and event["bp"] == "e" and stack and event["id"] in begun:
            found.arrows.append((begun[event["id"]], stack[-1]))
        else:
            found.lost.append(event)
    return found


def _begin(found: Opened, stack: list[Shown], new: Shown) -> None:
    is_instant = new.begin_ns == new.end_ns
    kept: Sequence[Shown] = [
        one
        for one in stack
        if one.end_ns > new.begin_ns or (one.end_ns == new.begin_ns and is_instant and one.begin_ns == one.end_ns)
    ]
    if any(new.begin_ns < one.end_ns < new.end_ns for one in kept):
        found.lost.append(new)
        return
    shown = Shown(new.thread, new.name, new.begin_ns, new.end_ns, len(kept))
    stack[:] = [*kept, shown]
    found.slices.append(shown)


def _ns(us: float) -> int:
    return int(us * 1000.0)
