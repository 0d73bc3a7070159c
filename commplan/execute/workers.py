"""Lanes on a CPU: one worker thread a lane, collectives that block their worker and nobody else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from commplan.execute.lanes import Interval, Task, Token, failure_of, timeout_error
from commplan.execute.waiting import wait_in_slices
from commplan.ops import COMPUTE_LANE

# Time past the limit before a worker that does not return from its collective is given up.
GRACE_S = 0.5


class Completion:
    """The token of a task on a worker."""

    __slots__ = ("done",)

    def __init__(self, *, done: bool = False) -> None:
        self.done = done


@dataclass(slots=True)
class _Queued:
    task: Task
    waits: tuple[Completion, ...]
    token: Completion
    issued_s: float


class _Worker:
    """One lane: a thread, its queue, and what it is running."""

    def __init__(self, lane: str, owner: WorkerLanes) -> None:
        self.lane = lane
        self.queue: deque[_Queued] = deque()
        self.running: tuple[Task, float] | None = None
        self.thread = threading.Thread(target=owner.serve, args=(self,), name=f"commplan-{lane}", daemon=True)
        self.thread.start()


class WorkerLanes:
    """In-order lanes as threads. One condition guards all of them: they are few, and ops are milliseconds long.

    Args:
        timeout_s: how long one collective may run.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._workers: dict[str, _Worker] = {}
        self._failure: Exception | None = None
        self._closing = False
        self._ops: list[Interval] = []
        self._waits: list[Interval] = []

    # Called by the thread that runs backward.

    @property
    def blocks_host(self) -> bool:
        """See `Lanes`."""
        return True

    @property
    def failure(self) -> Exception | None:
        """See `Lanes`."""
        return self._failure

    def open(self, lane: str, priority: str) -> None:
        """See `Lanes`. Threads start when they are first needed, and have no priority."""

    def compute(self) -> AbstractContextManager[None]:
        """See `Lanes`."""
        return nullcontext()

    def rest(self) -> None:
        """See `Lanes`."""

    def submit(self, lane: str, task: Task, waits: Sequence[Token]) -> Completion:
        """See `Lanes`."""
        token = Completion()
        issued_s = time.perf_counter()
        with self._changed:
            self._raise_failure()
            worker = self._workers.get(lane)
            if worker is None:
                worker = self._workers[lane] = _Worker(lane, self)
            worker.queue.append(_Queued(task, tuple(w for w in waits if isinstance(w, Completion)), token, issued_s))
            self._changed.notify_all()
        return token

    def mark(self) -> Completion:
        """See `Lanes`. Compute is the calling thread, so the point is reached already."""
        return Completion(done=True)

    def wait(self, tokens: Sequence[Token], why: str = "") -> None:
        """See `Lanes`.

        Raises:
            ExecutionError: a task failed or took longer than the timeout; names it.
        """
        pending = [t for t in tokens if isinstance(t, Completion) and not t.done]
        if not pending:
            with self._changed:
                self._raise_failure()
            return
        begin_s = time.perf_counter()
        with self._changed:
            while self._failure is None and not all(t.done for t in pending):
                self._changed.wait(timeout=GRACE_S)
                self._give_up_on_stuck()
            self._raise_failure()
        self._waits.append(Interval(why, COMPUTE_LANE, begin_s, time.perf_counter()))

    def drain(self) -> None:
        """See `Lanes`."""
        with self._changed:
            while self._failure is None and any(w.queue or w.running for w in self._workers.values()):
                self._changed.wait(timeout=GRACE_S)
                self._give_up_on_stuck()

    def in_flight(self) -> tuple[tuple[str, float], ...]:
        """See `Lanes`."""
        running = [worker.running for worker in list(self._workers.values())]
        return tuple((str(task), begin_s) for task, begin_s in filter(None, running))

    def take_intervals(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """See `Lanes`."""
        with self._changed:
            taken = tuple(self._ops), tuple(self._waits)
            self._ops, self._waits = [], []
        return taken

    def close(self) -> None:
        """See `Lanes`. A worker that hangs in a collective is left behind; it is a daemon and touches nothing any more."""
        with self._changed:
            self._closing = True
            for worker in self._workers.values():
                worker.queue.clear()
            self._changed.notify_all()
        for worker in self._workers.values():
            worker.thread.join(timeout=GRACE_S)

    def fail(self, error: Exception) -> None:
        """See `Lanes`."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            for worker in self._workers.values():
                worker.queue.clear()
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _give_up_on_stuck(self) -> None:
        now_s = time.perf_counter()
        for worker in self._workers.values():
            if worker.running is not None:
                task, begin_s = worker.running
                if now_s - begin_s > self._timeout_s + task.patience_s + GRACE_S:
                    self.fail(timeout_error(task, now_s - begin_s))

    # Called by the workers.

    def serve(self, worker: _Worker) -> None:
        """The loop of one worker thread."""
        while (queued := self._next(worker)) is not None:
            begin_s = time.perf_counter()
            worker.running = (queued.task, begin_s)
            try:
                with queued.task.around():
                    self._run(queued.task)
            except Exception as error:  # noqa: BLE001 - raised again on the thread of compute
                self.fail(failure_of(queued.task, error))
            end_s = time.perf_counter()
            with self._changed:
                worker.running = None
                queued.token.done = self._failure is None
                if queued.task.is_communication:
                    self._ops.append(Interval(queued.task.op, worker.lane, begin_s, end_s, queued.issued_s))
                # The task holds its buffers: they must not outlive it in an idle worker's frame.
                del queued
                self._changed.notify_all()

    def _next(self, worker: _Worker) -> _Queued | None:
        with self._changed:
            while not self._closing:
                if self._failure is None and worker.queue and all(w.done for w in worker.queue[0].waits):
                    return worker.queue.popleft()
                self._changed.wait()
            return None

    def _run(self, task: Task) -> None:
        begin_s = time.perf_counter()
        timeout_s = self._timeout_s + task.patience_s
        work = task.start()
        if work is not None and not wait_in_slices(work, timeout_s, self._is_given_up):
            raise timeout_error(task, time.perf_counter() - begin_s)
        task.finish()

    def _is_given_up(self) -> bool:
        return self._closing or self._failure is not None
