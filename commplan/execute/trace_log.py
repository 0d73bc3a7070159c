"""What the stream path does, written down as it is issued: kernels by stream with the buffers that they touch, events,
waits, allocations and releases.  `happens_before.check` judges such a log.

`RecordedLanes` are lanes that log; they run on any device, and slow the host down.  A collective is taken to run on a stream
of its process group's own, behind the stream on which it was issued, as NCCL's and HCCL's do.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commplan.execute.lanes import Task, Token
from commplan.execute.streams import DeviceHooks, StreamLanes, StreamToken


class Did(StrEnum):
    """Kinds of entries."""

    KERNEL = "kernel"
    RECORD = "record"
    WAIT = "wait"
    SEEN = "seen"
    ALLOCATE = "allocate"
    RELEASE = "release"
    FOREIGN = "foreign"
    ENTER = "enter"
    ASK = "ask"
    BEGIN = "begin"
    END = "end"
    WAITED = "waited"
    LEAVE = "leave"


class Part(NamedTuple):
    """Bytes `begin` to `end` of a buffer, gaps between rows included."""

    buffer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the host did.

    Attributes:
        did: KERNEL on `stream` reads and writes parts of buffers. RECORD of `event` on `stream`, by the event object `name`;
            WAIT of `stream` for `event`; SEEN: the host found `event` passed.
            ALLOCATE `buffer` from the pool of `stream`; RELEASE it. FOREIGN: `buffer` was allocated and written by somebody
            else, on `stream` before ENTER number `event`. ASK: op `op` shall run on a lane behind `ops` and behind compute
            (`stream`); BEGIN and END: its first and last point on its lane. WAITED: compute shall be behind `ops` now.
            LEAVE: the lanes' work for now is done, and the user goes on on `stream`.
    """

    did: Did
    stream: str = ""
    name: str = ""
    event: int = -1
    buffer: int = -1
    reads: tuple[Part, ...] = ()
    writes: tuple[Part, ...] = ()
    op: int = -1
    ops: tuple[int, ...] = ()


class TraceLog:
    """The entries, and names for what they speak of."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._buffers: dict[StorageWeakRef, int] = {}
        self._num_buffers = 0
        self._num_events = 0
        self._collective: int | None = None
        self.enter: tuple[str, int] = ("", -1)
        # Of the task that is being issued, in words.
        self.group = ""
        # Set while a backend works: what it does itself is part of its collective.
        self.is_quiet = False

    def new_event(self) -> int:
        """A number for an event."""
        self._num_events += 1
        return self._num_events

    def add(self, did: Did, stream: str = "", **details: Any) -> None:
        """Write an entry down."""
        self.entries.append(Entry(did, stream, **details))

    def join(self, later: str, earlier: str) -> None:
        """`later` waits for `earlier`."""
        event = self.new_event()
        self.add(Did.RECORD, earlier, event=event)
        self.add(Did.WAIT, later, event=event)

    def begin_collective(self, group: str, stream: str) -> None:
        """A collective is issued on `stream`; its kernel is the next entry on the stream of `group`."""
        self.join(group, stream)

    def end_collective(self, group: str) -> None:
        """The end of the collective, for who waits for its work."""
        self._collective = self.new_event()
        self.add(Did.RECORD, group, event=self._collective)

    def take_collective(self) -> int | None:
        """The event at the end of the last collective, if nobody took it."""
        taken, self._collective = self._collective, None
        return taken

    def part(self, tensor: torch.Tensor, pool: str | None) -> Part:
        """What a tensor covers of its memory; see `buffer`."""
        reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        begin = int(tensor.storage_offset()) * tensor.itemsize
        end = begin + (reach + 1) * tensor.itemsize if tensor.numel() else begin
        return Part(self.buffer(tensor, pool), begin, end)

    def buffer(self, tensor: torch.Tensor, pool: str | None) -> int:
        """The number of a tensor's memory; where it is new, `pool` is the stream that allocated it, None: somebody else did."""
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        number = self._buffers.get(key)
        if number is None:
            self._num_buffers += 1
            number = self._buffers[key] = self._num_buffers
            weakref.finalize(storage, self._release, key, number).atexit = False
            if pool is None:
                self.add(Did.FOREIGN, self.enter[0], event=self.enter[1], buffer=number)
            else:
                self.add(Did.ALLOCATE, pool, buffer=number)
        return number

    def _release(self, key: StorageWeakRef, number: int) -> None:
        del self._buffers[key]
        self.add(Did.RELEASE, buffer=number)


class TracedStream:
    """A stream that logs. Equal to others of the same stream."""

    def __init__(self, module: TracedModule, inner: Any, name: str) -> None:
        self.module, self.inner, self.name = module, inner, name

    def record_event(self, event: TracedEvent) -> None:
        """Record `event` here."""
        self.module.record(self, event)

    def wait_event(self, event: TracedEvent) -> None:
        """Let what is issued here from now on wait for `event`."""
        self.module.wait(self, event)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedStream) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.inner)


class TracedEvent:
    """An event that logs. Each record gets a number of its own, since waits look at the last record before them."""

    def __init__(self, inner: Any, log: TraceLog) -> None:
        self.inner = inner
        self.name = f"event {log.new_event()}"
        self.number = -1
        self._log = log
        self._thread = threading.get_ident()

    def query(self) -> bool:
        """Whether the device has passed it. What the watchdog sees is of no use to anybody's order."""
        is_passed = bool(self.inner.query())
        if is_passed and threading.get_ident() == self._thread:
            self._log.add(Did.SEEN, event=self.number)
        return is_passed

    def elapsed_time(self, later: TracedEvent) -> float:
        """Milliseconds from this to `later`."""
        return float(self.inner.elapsed_time(later.inner))


class TracedModule:
    """A device module of torch that logs what lanes ask of it."""

    def __init__(self, base: Any, device: torch.device, log: TraceLog) -> None:
        self.base, self.device, self.log = base, device, log
        self._known: dict[Any, TracedStream] = {}

    def Stream(self, device: torch.device, priority: int) -> TracedStream:  # noqa: N802 - torch's name
        """A new stream."""
        return self._traced(self.base.Stream(device=device, priority=priority), "lane")

    def Event(self, enable_timing: bool = False) -> TracedEvent:  # noqa: N802 - torch's name
        """A new event."""
        return TracedEvent(self.base.Event(enable_timing=enable_timing), self.log)

    def current_stream(self, device: torch.device) -> TracedStream:
        """The current stream of this thread."""
        return self._traced(self.base.current_stream(device), "compute")

    def stream(self, stream: TracedStream) -> AbstractContextManager[Any]:
        """Inside, `stream` is the current one."""
        return self.base.stream(stream.inner)

    def set_device(self, device: torch.device) -> None:
        """Let this thread belong to `device`."""
        self.base.set_device(device)

    def record(self, stream: TracedStream, event: TracedEvent) -> None:
        """See `TracedStream.record_event`."""
        event.number = self.log.new_event()
        self.log.add(Did.RECORD, stream.name, event=event.number, name=event.name)
        stream.inner.record_event(event.inner)

    def wait(self, stream: TracedStream, event: TracedEvent) -> None:
        """See `TracedStream.wait_event`. To wait for an event that was never recorded is no wait."""
        self.log.add(Did.WAIT, stream.name, event=event.number)
        stream.inner.wait_event(event.inner)

    def join_work(self, event: int) -> None:
        """The current stream waits for a collective."""
        self.log.add(Did.WAIT, self.current_stream(self.device).name, event=event)

    def _traced(self, inner: Any, kind: str) -> TracedStream:
        found = self._known.get(inner)
        if found is None:
            found = self._known[inner] = TracedStream(self, inner, f"{kind} {len(self._known)}")
        return found


class TracedWork:
    """A collective's handle that logs who waits for it."""

    def __init__(self, work: Any, module: TracedModule, event: int) -> None:
        self._work, self._module, self._event = work, module, event

    def wait(self) -> None:
        """Let the current stream wait."""
        self._module.log.is_quiet = True
        try:
            self._work.wait()
        finally:
            self._module.log.is_quiet = False
        self._module.join_work(self._event)


Watch = Callable[[TracedModule], AbstractContextManager[Any]]
"""Makes a context in which every op of torch on the calling thread is a kernel in the module's log."""


class RecordedLanes(StreamLanes):
    """`StreamLanes` that log.

    Args:
        module: logs; made for the lanes' device.
        watch: see `Watch`.
    """

    def __init__(self, module: TracedModule, timeout_s: float, watch: Watch, abort: Any = None) -> None:
        super().__init__(module.device, timeout_s, DeviceHooks(module, abort))
        self.log = module.log
        self._traced = module
        self._watch = watch
        self._inside = 0
        self._num_ops = 0
        self._op_of: dict[int, int] = {}

    def watching(self) -> AbstractContextManager[Any]:
        """A context in which what the calling thread does is logged."""
        return self._watch(self._traced)

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """See `StreamLanes`."""
        outside = self._traced.current_stream(self._traced.device).name
        if self._inside:
            with super().compute():
                yield
            return
        number = self.log.new_event()
        self.log.enter = (outside, number)
        self.log.add(Did.ENTER, outside, event=number)
        self._inside += 1
        try:
            with super().compute(), self.watching():
                yield
        finally:
            self._inside -= 1
            self.log.add(Did.LEAVE, outside)

    def submit(self, lane: str, task: Task, waits: Sequence[Token]) -> StreamToken:
        """See `StreamLanes`."""
        self._num_ops += 1
        op, log, home = self._num_ops, self.log, self._traced.current_stream(self._traced.device).name
        log.add(Did.ASK, home, name=task.op, op=op, ops=self._ops(waits))

        def current() -> str:
            return self._traced.current_stream(self._traced.device).name

        def start() -> Any:
            log.add(Did.BEGIN, current(), name=task.op, op=op)
            log.group = task.group
            work = task.start()
            event = log.take_collective()
            if event is None:
                return work
            if work is None:
                self._traced.join_work(event)
                return None
            return TracedWork(work, self._traced, event)

        def finish() -> None:
            task.finish()
            log.add(Did.END, current(), name=task.op, op=op)

        token = super().submit(lane, replace(task, start=start, finish=finish), waits)
        self._op_of[token.number] = op
        return token

    def wait(self, tokens: Sequence[Token], why: str = "") -> None:
        """See `StreamLanes`."""
        super().wait(tokens, why)
        self.log.add(Did.WAITED, self._traced.current_stream(self._traced.device).name, ops=self._ops(tokens))

    def _ops(self, tokens: Sequence[Token]) -> tuple[int, ...]:
        return tuple(self._op_of[t.number] for t in tokens if isinstance(t, StreamToken) and t.event is not None)
