"""The slowest lanes that a plan allows, and memory that punishes every early release.

A task runs only when something must have it: a wait of compute, a task that waits for it, the end of root.  A buffer is
filled with NaN when it is given back.  What a plan or the executor fails to wait for becomes visible in the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from commplan.execute.ending import Ending
from commplan.execute.lanes import Task
from commplan.execute.memory import Memory
from commplan.ops import COMPUTE_LANE
from commplan.sight.intervals import Interval


@dataclass(slots=True)
class _Held:
    task: Task | None
    lane: str
    before: list[_Held]


class LazyLanes:
    """See `commplan.execute.lanes.Lanes`. Everything runs on the calling thread."""

    blocks_host = True

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._last: dict[str, _Held] = {}
        self._ops: list[Interval] = []
        self.failure: Exception | None = None
        self.most_held = 0

    def open(self, lane: str, priority: str) -> None:
        pass

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rest(self) -> None:
        pass

    def submit(self, lane: str, task: Task, waits: Sequence[Any]) -> _Held:
        last = self._last.get(lane)
        held = _Held(task, lane, [*waits, *([last] if last else [])])
        self._last[lane] = held
        self.most_held = max(self.most_held, sum(1 for _ in self._pending()))
        return held

    def hold_back(self) -> None:
        pass

    def hand_over(self) -> None:
        pass

    def mark(self) -> _Held:
        return _Held(None, COMPUTE_LANE, [])

    def wait(self, tokens: Sequence[Any], why: str = "") -> None:
        if self.failure is not None:
            raise self.failure
        for token in tokens:
            self._force(token)

    def drain(self) -> None:
        for held in list(self._last.values()):
            self._force(held)

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error

    def in_flight(self) -> tuple[tuple[str, float], ...]:
        return ()

    def take_intervals(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        taken, self._ops = tuple(self._ops), []
        return taken, ()

    def close(self) -> None:
        self._last.clear()

    def let_go(self) -> Sequence[Ending]:
        return ()

    def _pending(self) -> Any:
        seen: set[int] = set()
        queue = list(self._last.values())
        while queue:
            held = queue.pop()
            if held.task is not None and id(held) not in seen:
                seen.add(id(held))
                yield held
                queue.extend(held.before)

    def _force(self, held: _Held) -> None:
        if held.task is None:
            return
        for earlier in held.before:
            self._force(earlier)
        task, held.task = held.task, None
        held.before = []
        begin_s = time.perf_counter()
        work = task.start()
        if work is not None:
            work.wait(self._timeout)
        task.finish()
        if task.is_communication:
            self._ops.append(Interval(task.op, held.lane, begin_s, time.perf_counter()))


class PoisonedMemory(Memory):
    """Fills what is given back with NaN."""

    def release(self, buffer: torch.Tensor, *, kept: bool = False) -> None:
        super().release(buffer, kept=kept)
        if not kept:
            buffer.fill_(float("nan"))
