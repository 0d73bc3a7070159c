"""Safeguards of the stream path, each taken away once: a wait, a record, a wait for a collective, a reference.

`run` trains under a schedule once for each call that the runtime makes, with that call left out, and tells what noticed:
the checker, the report (for events that only keep time), or nobody.  What nobody notices has to be a record that nobody waited
for, or redundant: the order that it makes is made by other waits as well, which `is_implied` shows by a search through the log
of the whole runtime.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from commplan.execute.collectives import Call
from commplan.execute.happens_before import check
from commplan.execute.issuing import Issuer
from commplan.execute.trace_log import Did, Entry, TracedEvent, TracedModule, TracedStream
from commplan.ops import COMPUTE_LANE, Kind

KINDS = ("wait", "record", "wait for a collective", "reference to inputs", "reference to a shard")


class Leaky(TracedModule):
    """A device module that leaves out one call: number `skipped` (from 0) of a kind."""

    skipped: tuple[str, int] | None = None

    def restart(self, skipped: tuple[str, int] | None) -> None:
        self.skipped = skipped
        self.counts: Counter[str] = Counter()
        self.places: dict[tuple[str, int], int] = {}

    def skips(self, kind: str) -> bool:
        number = self.counts[kind]
        self.counts[kind] += 1
        self.places[kind, number] = len(self.log.entries)
        return self.skipped == (kind, number)

    def record(self, stream: TracedStream, event: TracedEvent) -> None:
        if not self.skips("record"):
            super().record(stream, event)

    def wait(self, stream: TracedStream, event: TracedEvent) -> None:
        if not self.skips("wait"):
            super().wait(stream, event)

    def join_work(self, event: int) -> None:
        if not self.skips("wait for a collective"):
            super().join_work(event)


@contextmanager
def forgetful(module: Leaky) -> Iterator[None]:
    """Inside, an executor lets go of a buffer once it has issued its op, if the module says so."""
    original = Issuer._reduce

    def reduce(self: Issuer, backward: Any, call: Call, *rest: Any) -> None:
        original(self, backward, call, *rest)
        if not call.instances or call.step.lane == COMPUTE_LANE:
            return
        instance = call.instances[0]
        if call.step.kind is Kind.REDUCE_SCATTER and instance.inputs and module.skips("reference to inputs"):
            instance.release_inputs(self._store.memory)
        adds = instance.gradient is not None and any(p.sharded_param.grad is not None for p in instance.unit.raw.fsdp_params)
        # Where `.grad` is None it merely gets the shard sooner, and nobody reads it before the end of root.
        if call.step.kind is Kind.APPLY and adds and module.skips("reference to a shard"):
            instance.write()
            instance.release_shard(self._store.memory)

    with patch.object(Issuer, "_reduce", reduce):
        yield


@dataclass
class Tally:
    """What became of the mutants of one kind."""

    checker: int = 0
    report: int = 0
    unused: int = 0
    implied: int = 0
    survived: list[str] = field(default_factory=list)


def run(module: Leaky, train: Callable[[], bool]) -> dict[str, Tally]:
    """Every mutant of a runtime under one schedule.

    Args:
        train: runs the same backwards again from a clean state, leaves nothing alive; whether each of them `is_timed`.
    """
    tallies: dict[str, Tally] = defaultdict(Tally)
    entries, right = _trained(module, train, None)
    assert check(entries) == []
    assert right
    counts, places = module.counts, module.places
    for kind in KINDS:
        for number in range(counts[kind]):
            changed, right = _trained(module, train, (kind, number))
            tally = tallies[kind]
            if check(changed):
                tally.checker += 1
            elif not right:
                tally.report += 1
            elif not is_waited_for(entries, places[kind, number]):
                tally.unused += 1
            elif is_implied(entries, places[kind, number]):
                tally.implied += 1
            else:
                tally.survived.append(f"{number}: {entries[places[kind, number]]}")
    return dict(tallies)


def _trained(module: Leaky, train: Callable[[], bool], skipped: tuple[str, int] | None) -> tuple[list[Entry], bool]:
    module.log.entries.clear()
    module.restart(skipped)
    with forgetful(module):
        timed = train()
    module.skipped = None
    return list(module.log.entries), timed


def is_timed(timeline: Any) -> bool:
    """Whether every time of a report is that of this backward."""
    try:
        for span in (*timeline._spans[False], *timeline._spans[True]):
            if timeline._anchor.elapsed_time(span.begin) < 0 or span.begin.elapsed_time(span.end) < 0:
                return False
    except AssertionError:
        return False
    return True


def is_waited_for(entries: Sequence[Entry], place: int) -> bool:
    """Whether the entry is a wait, or a record that the device waits for or the host asks for."""
    entry = entries[place]
    return entry.did is not Did.RECORD or any(e.did in {Did.WAIT, Did.SEEN} and e.event == entry.event for e in entries[place:])


def is_implied(entries: Sequence[Entry], place: int) -> bool:
    """Whether the order made by the wait or record at `place` is also made without it: there is another path.

    Waits that follow each other on a stream are one: nothing runs there before the last of them.
    """
    record_of = {e.event: at for at, e in enumerate(entries) if e.did is Did.RECORD}
    entry = entries[place]
    if entry.did is Did.WAIT:
        cut = {(record_of[entry.event], place)} if entry.event in record_of else set()
    elif entry.did is Did.RECORD:
        cut = {(place, at) for at, e in enumerate(entries) if e.did is Did.WAIT and e.event == entry.event}
    else:
        return False
    edges: dict[int, list[int]] = defaultdict(list)
    last: dict[str, int] = {}
    for at, e in enumerate(entries):
        if not e.stream:
            continue
        if e.stream in last:
            edges[last[e.stream]].append(at)
        last[e.stream] = at
        if e.did is Did.WAIT and e.event in record_of and (record_of[e.event], at) not in cut:
            edges[record_of[e.event]].append(at)
    return all(_reaches(edges, begin, _row_of_waits(entries, end)) for begin, end in cut)


def _row_of_waits(entries: Sequence[Entry], at: int) -> set[int]:
    row = {at}
    for later in range(at + 1, len(entries)):
        if entries[later].stream == entries[at].stream:
            if entries[later].did is not Did.WAIT:
                break
            row.add(later)
    return row


def _reaches(edges: dict[int, list[int]], begin: int, ends: set[int]) -> bool:
    seen, queue = {begin}, deque([begin])
    while queue:
        for at in edges[queue.popleft()]:
            if at in ends:
                return True
            if at not in seen:
                seen.add(at)
                queue.append(at)
    return False


def table(of: dict[str, dict[str, Tally]]) -> str:
    """schedule -> kind -> tally, as text."""
    rows = [f"{'schedule':26} {'left out':22} {'checker':>8} {'report':>7} {'unused':>7} {'implied':>8} {'survived':>9}"]
    for schedule, tallies in of.items():
        for kind, t in tallies.items():
            numbers = f"{t.checker:8} {t.report:7} {t.unused:7} {t.implied:8} {len(t.survived):9}"
            rows.append(f"{schedule:26} {kind:22} {numbers}")
    return "\n".join(rows)
