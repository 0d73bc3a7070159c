"""Notices collectives that never end on a device, where nobody waits for them: it asks their events now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from commplan.execute.ending import Ending
from commplan.execute.lanes import Task, failure_of, timeout_error

logger = logging.getLogger("commplan")

# A timeout is noticed so much later at most, and a failure told.
MAX_PERIOD_S = 0.25
MIN_PERIOD_S = 0.002

# How often an idle thread looks whether it is to end, where nobody wakes it for that.
IDLE_S = 1.0


@dataclass(slots=True)
class Watched:
    """An op that was issued to a device. Holds none of its buffers.

    Attributes:
        op: its name with module and group, in words.
        before: events that it waits for, besides the op before it on its lane.
        end: the event behind it.
        lot: the backward to which its events belong.
        since_s: since when it could run, as far as was seen.
    """

    op: str
    patience_s: float
    process_group: dist.ProcessGroup | None
    before: Sequence[Any]
    end: Any
    lot: int
    since_s: float | None = None


class Watchdog:
    """A thread that looks at the first unfinished op of each lane.

    Args:
        timeout_s: how long an op may run, from when everything before it was over.
        fail: gets the error, once.
        abort: ends the collectives of a process group, so that what waits for them on the device goes on.
        enter: called first on the thread; makes its device the current one.
    """

    def __init__(
        self,
        timeout_s: float,
        fail: Callable[[Exception], None],
        abort: Callable[[dist.ProcessGroup], None],
        enter: Callable[[], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._period_s = max(MIN_PERIOD_S, min(MAX_PERIOD_S, timeout_s / 10))
        self._fail, self._abort, self._enter = fail, abort, enter
        self._lanes: dict[str, deque[Watched]] = {}
        self._passed_lot = -1
        self._busy = threading.Event()
        self._is_ending = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, lane: str, task: Task, before: Sequence[Any], end: Any, lot: int) -> None:
        """Look at an op that was issued on `lane`."""
        queue = self._lanes.get(lane)
        if queue is None:
            queue = self._lanes[lane] = deque()
        queue.append(Watched(str(task), task.patience_s, task.process_group, before, end, lot))
        if not self._busy.is_set():
            self._busy.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="commplan-watchdog", daemon=True)
            self._thread.start()

    def pass_through(self, lot: int) -> None:
        """Every op of this backward and of earlier ones is over, and their events may be used anew."""
        self._passed_lot = max(self._passed_lot, lot)

    def running(self) -> tuple[tuple[str, float], ...]:
        """Ops that were seen to be able to run and not to have ended, each with the time since when."""
        heads = [queue[0] for queue in list(self._lanes.values()) if queue]
        return tuple((head.op, head.since_s) for head in heads if head.since_s is not None)

    def close(self) -> None:
        """End the thread. One that hangs in the device's driver is left behind."""
        for ending in self.let_go():
            ending.join()

    def let_go(self) -> Sequence[Ending]:
        """Let the thread end by itself; see `Lanes.let_go`."""
        self._is_ending = True
        return [Ending(self._thread, partial(_wake, self._ending, self._busy))] if self._thread is not None else []

    def _run(self) -> None:
        self._enter()
        while not self._is_ending:
            if not self._busy.wait(IDLE_S):
                continue
            try:
                # A sum: every lane has to be looked at.
                is_idle = sum(self._look(queue) for queue in list(self._lanes.values())) == 0
            except Exception as error:
                logger.exception("the watchdog of a schedule failed")
                self._fail(failure_of("the watchdog", error))
                return
            if is_idle:
                self._busy.clear()
                # An op may have been issued between the look and here.
                if any(self._lanes.values()):
                    self._busy.set()
            self._ending.wait(self._period_s)

    def _look(self, queue: deque[Watched]) -> bool:
        """Drop what is over on one lane; True if something is left."""
        while queue:
            head = queue[0]
            if head.lot > self._passed_lot and not head.end.query():
                self._judge(head)
                return True
            queue.popleft()
        return False

    def _judge(self, head: Watched) -> None:
        now_s = time.perf_counter()
        if head.since_s is None:
            if all(event.query() for event in head.before):
                head.since_s = now_s
        elif now_s - head.since_s > self._timeout_s + head.patience_s:
            head.since_s = now_s  # Should it survive its abort, it is aborted again one timeout later.
            self._fail(timeout_error(head.op, self._timeout_s + head.patience_s))
            self._abort_all()

    def _abort_all(self) -> None:
        """End whatever is in flight: peers of the other collectives will not come either."""
        groups = {watched.process_group for queue in list(self._lanes.values()) for watched in list(queue)}
        for group in groups - {None}:
            assert group is not None
            try:
                self._abort(group)
            except Exception:
                logger.exception("a process group could not be aborted; work that waits for it on the device may never end")


def _wake(*asleep: threading.Event) -> None:
    for event in asleep:
        event.set()
