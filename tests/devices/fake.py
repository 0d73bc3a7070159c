"""A device that is a CPU: streams are in-order queues that run when they must, when they may, or now and then.

The stream of compute runs at once, as the host reaches it: it is the calling thread.  Lanes' streams hold back what they are
given.  Waits mean what they mean on CUDA: for the last record of the event before the wait, and nothing if there is none.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from commplan.execute.trace_log import Did, TraceLog


class Pace(Enum):
    """When a lane's stream runs what it can."""

    EAGER = "at once"
    LATE = "when compute waits for it"
    RANDOM = "now and then"


class FakeEvent:
    """See `torch.cuda.Event`."""

    def __init__(self, module: FakeModule, *, is_timed: bool) -> None:
        self._module, self._is_timed = module, is_timed
        self.num_issued = 0
        self.num_passed = 0
        self.stream: FakeStream | None = None
        self.time_ms = 0.0

    def query(self) -> bool:
        return self.num_passed == self.num_issued

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self._is_timed, "an event without timing"
        assert later._is_timed, "an event without timing"
        assert self.num_issued, "an event that was never recorded"
        assert later.num_issued, "an event that was never recorded"
        return later.time_ms - self.time_ms


class FakeStream:
    """See `torch.cuda.Stream`."""

    def __init__(self, module: FakeModule, *, is_compute: bool, priority: int = 0) -> None:
        self._module, self.is_compute, self.priority = module, is_compute, priority
        self.queue: deque[tuple[Callable[[], None], FakeEvent | None, int]] = deque()

    def record_event(self, event: FakeEvent) -> None:
        event.num_issued += 1
        event.stream = self
        number = event.num_issued

        def record() -> None:
            event.num_passed = max(event.num_passed, number)
            event.time_ms = self._module.tick()

        self.enqueue(record)

    def wait_event(self, event: FakeEvent) -> None:
        self.enqueue(lambda: None, event, event.num_issued)

    def enqueue(self, work: Callable[[], None], event: FakeEvent | None = None, number: int = 0) -> None:
        """Run `work` in order, and not before record `number` of `event`."""
        self.queue.append((work, event, number))
        if self.is_compute:
            self.run_all()
        self._module.turn()

    @property
    def can_step(self) -> bool:
        return bool(self.queue) and (self.queue[0][1] is None or self.queue[0][1].num_passed >= self.queue[0][2])

    def step(self) -> None:
        # It was logged when it was issued.
        with _disable_current_modes():
            self.queue.popleft()[0]()

    def run_all(self) -> None:
        while self.queue:
            self.run_one()

    def run_one(self) -> None:
        """Run the next entry, and first whatever it waits for."""
        _, event, number = self.queue[0]
        while event is not None and event.num_passed < number:
            assert event.stream is not None
            event.stream.run_one()
        self.step()


class FakeModule:
    """See `torch.cuda`, as lanes see it.

    Args:
        pace: of the lanes' streams.
        seed: of their turns at random; equal on all ranks, so that they run collectives in the same order.
    """

    def __init__(self, pace: Pace, seed: int = 0) -> None:
        self._pace = pace
        self._draw = random.Random(seed)
        self._ms = 0.0
        self.home = FakeStream(self, is_compute=True)
        self._current = self.home
        self._lanes: list[FakeStream] = []
        self._is_turning = False

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:
        lane = FakeStream(self, is_compute=False, priority=priority)
        self._lanes.append(lane)
        return lane

    def compute_stream(self) -> FakeStream:
        """Another stream that runs at once."""
        return FakeStream(self, is_compute=True)

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, is_timed=enable_timing)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def set_device(self, device: torch.device) -> None:
        pass

    def tick(self) -> float:
        self._ms += 1.0
        return self._ms

    def turn(self) -> None:
        """Let streams run, as their pace has it."""
        if self._is_turning or self._pace is Pace.LATE:
            return
        self._is_turning = True
        try:
            while ready := [lane for lane in self._lanes if lane.can_step]:
                if self._pace is Pace.RANDOM and self._draw.random() < 0.5:
                    return
                self._draw.choice(ready).step()
        finally:
            self._is_turning = False

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of torch in its place on the current stream: later, if nothing but an argument comes of it."""
        written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if self._current.is_compute or not written:
            return func(*args, **kwargs)
        self._current.enqueue(lambda: func(*args, **kwargs))
        name = func._schema.arguments[written[0]].name
        return kwargs[name] if name in kwargs else args[written[0]]


class FakeWork:
    """A collective that runs on the stream of its process group."""

    def __init__(self, module: FakeModule, over: FakeEvent) -> None:
        self._module, self._over = module, over

    def wait(self) -> None:
        self._module.current_stream(torch.device("cpu")).wait_event(self._over)


class Collectives:
    """Takes the place of torch's collectives on lanes, and runs them when their streams get to them."""

    def __init__(self, module: FakeModule, log: TraceLog, name_of: Callable[[FakeStream], str]) -> None:
        self._module, self._log, self._name_of = module, log, name_of
        self._streams: dict[str, FakeStream] = {}
        # FSDP2's all-gather calls one of two, by torch release.
        num_tensors_of = {"all_reduce": 1, "reduce_scatter_tensor": 2, "all_gather_into_tensor": 2, "all_gather_single": 2}
        self.by_name = {
            name: self._deferred(getattr(dist, name), num_tensors)
            for name, num_tensors in num_tensors_of.items()
            if hasattr(dist, name)
        }

    def _deferred(self, original: Callable[..., Any], num_tensors: int) -> Callable[..., Any]:
        def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            module, log = self._module, self._log
            current = module.current_stream(torch.device("cpu"))
            if current.is_compute:
                return original(*args, async_op=async_op, **kwargs)
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            assert len(tensors) == num_tensors
            group = log.group
            parts = tuple(log.part(t, None) for t in tensors)
            log.begin_collective(group, self._name_of(current))
            log.add(Did.KERNEL, group, name=original.__name__, reads=parts[-1:], writes=parts[:1])
            log.end_collective(group)
            stream = self._streams.setdefault(group, module.Stream(torch.device("cpu")))
            begin, over = module.Event(), module.Event()
            current.record_event(begin)
            stream.wait_event(begin)

            stream.enqueue(lambda: original(*args, **kwargs))
            stream.record_event(over)
            return FakeWork(module, over)

        return collective
