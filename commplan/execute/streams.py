"""Lanes on a device: one stream a lane, events between them. The host issues and never waits.

CUDA, NPU and others alike: all that is asked of a device is what its module in torch has in common with the others
(`torch.get_device_module`): streams, events, the current stream.

One stream stands for compute, *home*: the one that was current at the first hook of a backward.  Buffers are allocated and
released while it is current, so their memory goes back to its pool, and "compute is behind the last reader" is one order.
Hooks that find another stream current (compute of a module ran beside the rest; the end of backward runs on its caller's
stream) are joined to home on their way in, and wait for it on their way out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commplan.execute.ending import Ending
from commplan.execute.events import EventPool
from commplan.execute.lanes import Task, Token, failure_of, timeout_error
from commplan.execute.timeline import LazyIntervals, Span, Timeline
from commplan.execute.watchdog import Watchdog
from commplan.ops import COMPUTE_LANE
from commplan.sight.intervals import Interval

# How long what is in flight is waited for when lanes end that failed.
GRACE_S = 1.0

# Devices rank priorities by number, lower ones first; 0 is every stream's unless it asks for another.
PRIORITIES = {"high": -1, "normal": 0}


@dataclass(slots=True)
class StreamToken:
    """The end of a task: `event` on `lane`, `number` counts the tasks of all lanes. Without an event: a point of compute."""

    lane: str
    number: int
    event: Any = None


@dataclass(frozen=True, slots=True)
class DeviceHooks:
    """What may be given to lanes from outside.

    Attributes:
        module: the device's module; by default torch's own for it.
        abort: ends the collectives of a process group.
    """

    module: Any = None
    abort: Any = None


class StreamLanes:
    """See `Lanes`.

    Where a backend's `Work.wait` blocks the host (gloo, on tensors of a device), so does `submit`; NCCL's and HCCL's does not.

    Args:
        device: where buffers live.
        timeout_s: how long one collective may run, from when everything before it is over.
    """

    def __init__(self, device: torch.device, timeout_s: float, hooks: DeviceHooks | None = None) -> None:
        hooks = hooks or DeviceHooks()
        self._device = device
        self._timeout_s = timeout_s
        self._module = hooks.module or torch.get_device_module(device)
        self._failure: Exception | None = None
        self._watchdog = Watchdog(timeout_s, self.fail, hooks.abort or dist.ProcessGroup.abort, self._enter_thread)
        self._pool = EventPool(self._module)
        self._streams: dict[str, Any] = {}
        self._tails: dict[str, StreamToken] = {}
        # Lane -> the number of the last of its tasks that home is behind, or will be once it gets there.
        self._passed: dict[str, int] = {}
        self._num_tasks = 0
        self._home: Any = None
        self._last_home: Any = None
        # Other streams on which hooks of this backward ran. An event of theirs is not pooled: they outlive the backward.
        self._guests: list[Any] = []
        self._timeline: Timeline | None = None

    @property
    def blocks_host(self) -> bool:
        """See `Lanes`."""
        return False

    @property
    def failure(self) -> Exception | None:
        """See `Lanes`."""
        return self._failure

    def open(self, lane: str, priority: str) -> None:
        """See `Lanes`. A lane that is opened again keeps its stream."""
        if lane != COMPUTE_LANE and lane not in self._streams:
            self._streams[lane] = self._module.Stream(device=self._device, priority=PRIORITIES[priority])

    def compute(self) -> contextlib.AbstractContextManager[None]:
        """See `Lanes`. Inside, home is the current stream."""
        current = self._module.current_stream(self._device)
        if self._home is None:
            self._settle(current)
        if self._timeline is None:
            self._begin()
        if current == self._home and not self._guests:
            return contextlib.nullcontext()
        return self._at_home(current)

    @contextlib.contextmanager
    def _at_home(self, current: Any) -> Iterator[None]:
        home = self._home
        if current != home:
            if current not in self._guests:
                self._guests.append(current)
            self._join(home, current)
        try:
            with self._module.stream(home):
                yield
        finally:
            # Each of them: memory that its own pool gave out may have been released inside.
            for guest in self._guests:
                self._join(guest, home)

    def submit(self, lane: str, task: Task, waits: Sequence[Token]) -> StreamToken:
        """See `Lanes`.

        Raises:
            ExecutionError: an earlier task failed, or this one can't be issued.
        """
        self._raise_failure()
        stream = self._streams[lane]
        before = [self._pool.take(timed=task.is_communication)]
        self._home.record_event(before[0])
        # The tokens that home is behind are implied by this one.
        stream.wait_event(before[0])
        for token in self._ahead(waits, but=lane):
            stream.wait_event(token.event)
            before.append(token.event)
        begin = self._record(stream) if task.is_communication else None
        self._issue(stream, task)
        self._num_tasks += 1
        token = StreamToken(lane, self._num_tasks, self._record(stream))
        if begin is not None and self._timeline is not None:
            self._timeline.add(Span(task.op, lane, begin, token.event, before[0]))
        self._tails[lane] = token
        self._watchdog.watch(lane, task, before, token.event, self._pool.lot)
        return token

    def hold_back(self) -> None:
        """See `Lanes`. What is issued costs the device's own time."""

    def hand_over(self) -> None:
        """See `Lanes`."""

    def mark(self) -> StreamToken:
        """See `Lanes`. Whatever is submitted later is behind this point anyway."""
        return StreamToken(COMPUTE_LANE, self._num_tasks)

    def wait(self, tokens: Sequence[Token], why: str = "") -> None:
        """See `Lanes`. Only home waits.

        Raises:
            ExecutionError: a task failed, or was found not to end.
        """
        self._raise_failure()
        self._wait(tokens, why)

    def drain(self) -> None:
        """See `Lanes`."""
        self._wait(list(self._tails.values()))

    def take_intervals(self) -> tuple[Sequence[Interval], Sequence[Interval]]:
        """See `Lanes`."""
        timeline, self._timeline = self._timeline, None
        if timeline is None:
            return (), ()
        if self._ahead(list(self._tails.values())):
            # Something may yet run, so home can't tell when its events are free.
            self._pool.forget()
        else:
            fence = self._module.Event()
            self._home.record_event(fence)
            self._pool.retire(fence, timeline)
        return LazyIntervals(timeline, is_wait=False), LazyIntervals(timeline, is_wait=True)

    def rest(self) -> None:
        """See `Lanes`."""
        if self._home is not None:
            self._last_home, self._home = self._home, None

    def fail(self, error: Exception) -> None:
        """See `Lanes`. What was issued runs on, or ends with its process group."""
        if self._failure is None:
            self._failure = error

    def in_flight(self) -> tuple[tuple[str, float], ...]:
        """See `Lanes`."""
        return self._watchdog.running()

    def close(self) -> None:
        """See `Lanes`. Waits for what is in flight, at most the timeout: process groups must have nothing left to do."""
        limit_s = time.perf_counter() + (GRACE_S if self._failure is not None else self._timeout_s)
        for token in self._tails.values():
            while not token.event.query() and time.perf_counter() < limit_s:
                time.sleep(0.001)
        self._watchdog.close()
        self._tails.clear()

    def let_go(self) -> Sequence[Ending]:
        """See `Lanes`."""
        return self._watchdog.let_go()

    # Below: streams and events.

    def _enter_thread(self) -> None:
        """Let the thread that asks events belong to the device."""
        if self._device.index is not None:
            self._module.set_device(self._device)

    def _settle(self, current: Any) -> None:
        """Let compute be `current`, behind what it was before."""
        self._home = current
        self._guests.clear()
        if self._last_home is not None and self._last_home != current:
            self._join(current, self._last_home)

    def _begin(self) -> None:
        """A backward begins."""
        self._watchdog.pass_through(self._pool.reclaim())
        self._timeline = Timeline(self._record(self._home), self._record_now, self._timeout_s)

    def _join(self, later: Any, earlier: Any) -> None:
        """Let stream `later` wait for what `earlier` has been given so far."""
        event = self._module.Event()
        earlier.record_event(event)
        later.wait_event(event)

    def _record(self, stream: Any) -> Any:
        event = self._pool.take(timed=True)
        stream.record_event(event)
        return event

    def _record_now(self) -> Any:
        """A timed event of nobody's, behind what compute was given so far."""
        event = self._module.Event(enable_timing=True)
        (self._home or self._last_home).record_event(event)
        return event

    def _issue(self, stream: Any, task: Task) -> None:
        begin_s = time.perf_counter()
        try:
            with self._module.stream(stream), task.around():
                work = task.start()
                if work is not None:
                    work.wait()
                task.finish()
        except Exception as error:  # noqa: BLE001 - raised again with the op's name
            elapsed_s = time.perf_counter() - begin_s
            has_expired = isinstance(error, RuntimeError) and elapsed_s >= self._timeout_s * 0.99
            self.fail(timeout_error(task, elapsed_s) if has_expired else failure_of(task, error))
            self._raise_failure(error)

    def _ahead(self, tokens: Sequence[Token], but: str = COMPUTE_LANE) -> list[StreamToken]:
        """The tokens that home is not behind, the last of each lane, without those of lane `but`."""
        last: dict[str, StreamToken] = {}
        for token in tokens:
            assert isinstance(token, StreamToken)
            if token.event is None or token.lane == but or token.number <= self._passed.get(token.lane, 0):
                continue
            known = last.get(token.lane)
            if known is None or known.number < token.number:
                last[token.lane] = token
        return list(last.values())

    def _wait(self, tokens: Sequence[Token], why: str = "") -> None:
        ahead = self._ahead(tokens)
        if not ahead:
            return
        begin = self._record(self._home)
        for token in ahead:
            self._home.wait_event(token.event)
            self._passed[token.lane] = token.number
        if self._timeline is not None:
            self._timeline.add(Span(why, COMPUTE_LANE, begin, self._record(self._home)), is_wait=True)

    def _raise_failure(self, cause: BaseException | None = None) -> None:
        if self._failure is not None:
            error = self._failure
            if cause is not None and error is not cause and error.__cause__ is None:
                raise error from cause
            raise error
