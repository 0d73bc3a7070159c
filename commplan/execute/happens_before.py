"""Judges a log of streams (`trace_log`): is each access of a buffer ordered behind those that it depends on?

A vector clock a stream, nothing else; it knows nothing of plans, lanes or the executor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from commplan.execute.trace_log import Did, Entry

Clock = dict[str, int]
Extents = dict[tuple[float, float], Clock]
"""Bytes from, to -> the last points at which streams accessed just these."""


@dataclass(slots=True)
class _Buffer:
    pool: str
    reads: Extents = field(default_factory=dict)
    writes: Extents = field(default_factory=dict)


@dataclass(slots=True)
class _Op:
    name: str
    compute: tuple[str, int]
    behind: tuple[int, ...]
    stream: str = ""
    end: int = 0
    is_over: bool = False


@dataclass(slots=True)
class _Judge:
    clocks: dict[str, Clock] = field(default_factory=dict)
    events: dict[int, Clock] = field(default_factory=dict)
    waits: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    last_of: dict[str, int] = field(default_factory=dict)
    host: Clock = field(default_factory=dict)
    enters: dict[int, int] = field(default_factory=dict)
    buffers: dict[int, _Buffer] = field(default_factory=dict)
    ops: dict[int, _Op] = field(default_factory=dict)
    released: dict[str, list[tuple[int, _Buffer]]] = field(default_factory=dict)
    issuing: Clock = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def tick(self, stream: str) -> int:
        """A point on `stream` behind all before it, where memory may be used."""
        self.reuse(stream)
        return self.advance(stream)

    def advance(self, stream: str) -> int:
        """A point on `stream` behind all before it."""
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def require(self, stream: str, accesses: Clock, what: str) -> None:
        """`stream` has to be behind all of `accesses`."""
        clock = self.clocks.setdefault(stream, {})
        late = [f"{other}" for other, point in accesses.items() if clock.get(other, 0) < point]
        if late:
            self.problems.append(f"{what} on {stream!r} is not ordered behind {', '.join(late)}")

    def buffer(self, number: int) -> _Buffer:
        """What is known of a buffer; of one of before the log began, nothing."""
        return self.buffers.setdefault(number, _Buffer(""))

    def require_parts(self, stream: str, extents: Extents, what: str, within: tuple[float, float] = (0, inf)) -> None:
        """`stream` has to be behind all accesses of bytes that are `within` these."""
        for (begin, end), accesses in extents.items():
            if begin < within[1] and within[0] < end:
                self.require(stream, accesses, what)

    def reuse(self, pool: str) -> None:
        """What was released to `pool` may be in use again from here on."""
        for number, buffer in self.released.pop(pool, ()):
            for extents in (buffer.reads, buffer.writes):
                self.require_parts(pool, extents, f"use of what was buffer {number}")

    def require_ops(self, stream: str, numbers: Iterable[int], what: str) -> None:
        for number in numbers:
            op = self.ops[number]
            if not op.is_over:
                self.problems.append(f"{what} on {stream!r} is behind {op.name}, which was not issued")
            else:
                self.require(stream, {op.stream: op.end}, f"{what} (behind {op.name})")


def check(entries: Iterable[Entry]) -> list[str]:
    """Everything that is wrong with a log.

    - Each byte of a buffer is read behind its last writes, and written behind all accesses before.
    - After its release, whatever its pool's stream does next (with the memory, as far as anybody can tell) is behind all
      accesses.
    - An op begins behind the ops that it was asked to be behind, the op before it on its stream, and the point that compute had
      reached when it was asked for, and ends behind its own kernels. Compute goes on behind the ops that it was to wait for.
    - An event is not recorded anew before the host has seen that every wait for it is over.
    - In the end, the stream on which the user goes on is behind every access.
    """
    judge = _Judge()
    last_leave = ""
    for entry in entries:
        _STEPS[entry.did](judge, entry)
        if entry.did is Did.LEAVE:
            last_leave = entry.stream
    for pool in list(judge.released):
        judge.reuse(pool)
    for number, buffer in judge.buffers.items():
        judge.require_parts(last_leave, buffer.reads, f"the end, of buffer {number}")
        judge.require_parts(last_leave, buffer.writes, f"the end, of buffer {number}")
    judge.require_ops(last_leave, judge.ops, "the end")
    return judge.problems


def _kernel(judge: _Judge, entry: Entry) -> None:
    for number, begin, end in entry.reads:
        told = f"{entry.name}, reading buffer {number},"
        judge.require_parts(entry.stream, judge.buffer(number).writes, told, (begin, end))
    for number, begin, end in entry.writes:
        told = f"{entry.name}, writing buffer {number},"
        judge.require_parts(entry.stream, judge.buffer(number).writes, told, (begin, end))
        judge.require_parts(entry.stream, judge.buffer(number).reads, told, (begin, end))
    point = judge.issuing[entry.stream] = judge.tick(entry.stream)
    for number, begin, end in entry.reads:
        judge.buffers[number].reads.setdefault((begin, end), {})[entry.stream] = point
    for number, begin, end in entry.writes:
        judge.buffers[number].writes.setdefault((begin, end), {})[entry.stream] = point


def _record(judge: _Judge, entry: Entry) -> None:
    for stream, point in judge.waits.pop(judge.last_of.get(entry.name, -1), ()):
        if judge.host.get(stream, 0) < point:
            judge.problems.append(f"{entry.name} is recorded anew on {entry.stream!r} while {stream!r} may still wait for it")
    if entry.name:
        judge.last_of[entry.name] = entry.event
    judge.events[entry.event] = dict(judge.clocks.setdefault(entry.stream, {}))


def _seen(judge: _Judge, entry: Entry) -> None:
    for stream, point in judge.events.get(entry.event, {}).items():
        judge.host[stream] = max(judge.host.get(stream, 0), point)


def _wait(judge: _Judge, entry: Entry) -> None:
    judge.waits.setdefault(entry.event, []).append((entry.stream, judge.advance(entry.stream)))
    clock = judge.clocks.setdefault(entry.stream, {})
    for stream, point in judge.events.get(entry.event, {}).items():
        clock[stream] = max(clock.get(stream, 0), point)


def _allocate(judge: _Judge, entry: Entry) -> None:
    judge.reuse(entry.stream)
    judge.buffers[entry.buffer] = _Buffer(entry.stream)


def _foreign(judge: _Judge, entry: Entry) -> None:
    judge.buffers[entry.buffer] = _Buffer(entry.stream, writes={(0, inf): {entry.stream: judge.enters[entry.event]}})


def _release(judge: _Judge, entry: Entry) -> None:
    # One of before the log began is nobody's here.
    if (buffer := judge.buffers.pop(entry.buffer, None)) is not None:
        judge.released.setdefault(buffer.pool, []).append((entry.buffer, buffer))


def _enter(judge: _Judge, entry: Entry) -> None:
    judge.enters[entry.event] = judge.tick(entry.stream)


def _ask(judge: _Judge, entry: Entry) -> None:
    judge.ops[entry.op] = _Op(entry.name, (entry.stream, judge.tick(entry.stream)), entry.ops)


def _begin(judge: _Judge, entry: Entry) -> None:
    op = judge.ops[entry.op]
    stream, point = op.compute
    judge.require(entry.stream, {stream: point}, f"{op.name} (behind compute)")
    judge.require_ops(entry.stream, op.behind, op.name)
    judge.issuing = {}


def _end(judge: _Judge, entry: Entry) -> None:
    op = judge.ops[entry.op]
    judge.require(entry.stream, judge.issuing, f"the end of {op.name}")
    op.stream, op.end, op.is_over = entry.stream, judge.tick(entry.stream), True


def _waited(judge: _Judge, entry: Entry) -> None:
    judge.require_ops(entry.stream, entry.ops, "compute")


def _leave(judge: _Judge, entry: Entry) -> None:
    judge.tick(entry.stream)


_STEPS = {
    Did.KERNEL: _kernel,
    Did.RECORD: _record,
    Did.WAIT: _wait,
    Did.SEEN: _seen,
    Did.ALLOCATE: _allocate,
    Did.FOREIGN: _foreign,
    Did.RELEASE: _release,
    Did.ENTER: _enter,
    Did.ASK: _ask,
    Did.BEGIN: _begin,
    Did.END: _end,
    Did.WAITED: _waited,
    Did.LEAVE: _leave,
}
