"""Lanes on a CPU: one worker thread a lane, collectives that block their worker and nobody else.

A worker is woken only for a task that may start: whoever ends a task counts down what waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from commplan.execute.ending import Ending
from commplan.execute.lanes import Task, Token, failure_of, timeout_error
from commplan.execute.waiting import wait_in_slices
from commplan.ops import COMPUTE_LANE
from commplan.sight.intervals import Interval

# Time past the limit before a worker that does not return from its collective is given up.
GRACE_S = 0.5


class Completion:
    """The token of a task on a worker: whether it is over, and what waits for that."""

    __slots__ = ("done", "followers")

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self.followers: list[_Queued | _Gate] = []


class _Gate:
    """Holds the thread of compute until all that it waits for is over."""

    __slots__ = ("lock", "missing")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.lock = threading.Lock()
        self.lock.acquire()

    def open(self) -> None:
        """Let the thread go on; more than once does no harm."""
        if self.lock.locked():
            self.lock.release()


class _Queued:
    """A task on its way to its worker; `missing` counts what has to be over before."""

    __slots__ = ("issued_s", "missing", "task", "token", "worker")

    def __init__(self, task: Task, worker: _Worker, token: Completion, issued_s: float) -> None:
        self.task = task
        self.worker = worker
        self.token = token
        self.issued_s = issued_s
        self.missing = 0

    def open(self) -> None:
        """Hand it to its worker."""
        self.worker.ready.put(self)


@dataclass(slots=True, weakref_slot=True)
class _Worker:
    """One lane: a thread, the task that it may run next, and what it is running."""

    lane: str
    ready: queue.SimpleQueue[_Queued | None] = field(default_factory=queue.SimpleQueue)
    last: Completion = field(default_factory=lambda: Completion(done=True))
    running: tuple[Task, float] | None = None
    thread: threading.Thread | None = None


class WorkerLanes:
    """In-order lanes as threads. One lock guards what waits for what; it is held for microseconds.

    Args:
        timeout_s: how long one collective may run.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._gate: _Gate | None = None
        self._failure: Exception | None = None
        self._closing = False
        self._holds_back = False
        self._held_back: list[_Queued] = []
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
        worker = self._workers.get(lane) or self._start(lane)
        token = Completion()
        queued = _Queued(task, worker, token, time.perf_counter())
        with self._lock:
            self._raise_failure()
            self._follow(queued, (worker.last, *waits))
            worker.last = token
            if queued.missing > 0:
                return token
        if self._holds_back:
            self._held_back.append(queued)
        else:
            queued.open()
        return token

    def hold_back(self) -> None:
        """See `Lanes`."""
        self._holds_back = True

    def hand_over(self) -> None:
        """See `Lanes`."""
        self._holds_back = False
        self._open_held_back()

    def mark(self) -> Completion:
        """See `Lanes`. Compute is the calling thread, so the point is reached already."""
        return Completion(done=True)

    def wait(self, tokens: Sequence[Token], why: str = "") -> None:
        """See `Lanes`.

        Raises:
            ExecutionError: a task failed or took longer than the timeout; names it.
        """
        begin_s = time.perf_counter()
        if self._is_held(tokens):
            self._waits.append(Interval(why, COMPUTE_LANE, begin_s, time.perf_counter()))
        self._raise_failure()

    def drain(self) -> None:
        """See `Lanes`."""
        self._is_held([worker.last for worker in self._workers.values()])

    def in_flight(self) -> tuple[tuple[str, float], ...]:
        """See `Lanes`."""
        running = [worker.running for worker in list(self._workers.values())]
        return tuple((str(task), begin_s) for task, begin_s in filter(None, running))

    def take_intervals(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """See `Lanes`."""
        with self._lock:
            taken = tuple(self._ops), tuple(self._waits)
            self._ops, self._waits = [], []
        return taken

    def close(self) -> None:
        """See `Lanes`. A worker that hangs in a collective is left behind; it is a daemon and touches nothing any more."""
        for ending in self.let_go():
            ending.join()

    def let_go(self) -> Sequence[Ending]:
        """See `Lanes`."""
        self._closing = True
        workers = list(self._workers.values())
        for worker in workers:
            worker.ready.put(None)
        limit_s = self._timeout_s
        return [
            Ending(worker.thread, returns_s=partial(_returns_s, weakref.ref(worker), limit_s))
            for worker in workers
            if worker.thread is not None
        ]

    def fail(self, error: Exception) -> None:
        """See `Lanes`."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            if self._gate is not None:
                self._gate.open()

    def _start(self, lane: str) -> _Worker:
        worker = self._workers[lane] = _Worker(lane)
        worker.thread = threading.Thread(target=self.serve, args=(worker,), name=f"commplan-{lane}", daemon=True)
        worker.thread.start()
        return worker

    def _follow(self, follower: _Queued | _Gate, tokens: Sequence[Token]) -> None:
        """Let `follower` be opened when all tokens are done; with the lock held."""
        for token in tokens:
            if isinstance(token, Completion) and not token.done:
                token.followers.append(follower)
                follower.missing += 1

    def _is_held(self, tokens: Sequence[Token]) -> bool:
        """Hold the thread of compute until all tokens are done, or something fails; whether it had to wait at all."""
        pending = [token for token in tokens if isinstance(token, Completion) and not token.done]
        if not pending:
            return False
        self._open_held_back()
        gate = _Gate(0)
        with self._lock:
            self._follow(gate, pending)
            if gate.missing == 0 or self._failure is not None:
                return False
            self._gate = gate
        while not gate.lock.acquire(timeout=GRACE_S):
            self._give_up_on_stuck()
        self._gate = None
        return True

    def _open_held_back(self) -> None:
        while self._held_back:
            self._held_back.pop(0).open()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _give_up_on_stuck(self) -> None:
        now_s = time.perf_counter()
        for worker in self._workers.values():
            running = worker.running
            if running is not None and now_s > _limit_s(running, self._timeout_s) + GRACE_S:
                task, begin_s = running
                self.fail(timeout_error(task, now_s - begin_s))

    # Called by the workers.

    def serve(self, worker: _Worker) -> None:
        """The loop of one worker thread."""
        while (queued := worker.ready.get()) is not None and not self._closing and self._failure is None:
            self._serve_one(queued)
            # The task holds its buffers: they must not outlive it in an idle worker's frame.
            del queued

    def _serve_one(self, queued: _Queued) -> None:
        """Run a task that may start."""
        task, worker, begin_s = queued.task, queued.worker, time.perf_counter()
        worker.running = (task, begin_s)
        try:
            with task.around():
                self._run(task, begin_s)
        except Exception as error:  # noqa: BLE001 - raised again on the thread of compute
            self.fail(failure_of(task, error))
        worker.running = None
        if task.is_communication:
            self._ops.append(Interval(task.op, worker.lane, begin_s, time.perf_counter(), queued.issued_s))
        if self._failure is None:
            self._end(queued.token)

    def _end(self, token: Completion) -> None:
        """Open what waited for `token` alone."""
        with self._lock:
            token.done = True
            followers, token.followers = token.followers, []
            for follower in followers:
                follower.missing -= 1
                if follower.missing == 0:
                    follower.open()

    def _run(self, task: Task, begin_s: float) -> None:
        timeout_s = self._timeout_s + task.patience_s
        work = task.start()
        if work is not None and not wait_in_slices(work, timeout_s, self._is_given_up):
            raise timeout_error(task, time.perf_counter() - begin_s)
        task.finish()

    def _is_given_up(self) -> bool:
        return self._closing or self._failure is not None


def _limit_s(running: tuple[Task, float], timeout_s: float) -> float:
    """When a task that began then is over at the latest."""
    task, begin_s = running
    return begin_s + timeout_s + task.patience_s


def _returns_s(reference: weakref.ref[_Worker], timeout_s: float) -> float | None:
    """When the worker will be back from the collective that it runs; nobody but its thread keeps a worker that was let go."""
    worker = reference()
    running = worker.running if worker is not None else None
    return None if running is None else _limit_s(running, timeout_s)
