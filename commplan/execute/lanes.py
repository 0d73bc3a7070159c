"""Lanes: in-order queues on which ops run beside compute. What a kind of device has to provide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from commplan.errors import CollectiveTimeoutError, ExecutionError
from commplan.execute.ending import Ending
from commplan.sight.intervals import Interval


class Token(Protocol):
    """Stands for the end of one task."""


@dataclass(slots=True)
class Task:
    """One op as a lane runs it.

    Attributes:
        op: the op's name in the plan, with the module and the group in words for messages.
        start: begins the op; returns the collective's handle, or None if it is over or there is none.
        finish: what remains to be done on the lane when the collective is complete.
        is_communication: whether its time counts as communication in reports.
        patience_s: time that it may take beyond the timeout, so that another op's timeout is told first.
        process_group: what its collective runs on, if it is one; aborted when it never ends.
        around: makes what the lane enters while it runs the task, a range of a profiler.
    """

    op: str
    module: str
    group: str
    start: Callable[[], dist.Work | None]
    finish: Callable[[], None]
    is_communication: bool = True
    patience_s: float = 0.0
    process_group: dist.ProcessGroup | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __str__(self) -> str:
        return " ".join([self.op, *([f"of module {self.module!r}"] if self.module else []), f"on {self.group}"])


class Lanes(Protocol):
    """The lanes of one attachment.

    A submitted task starts when compute has reached the point of submission, every token in `waits` is complete, and the
    task before it on its lane is over.  After a failure every call raises it.  What a task writes is allocated before it is
    submitted, inside `compute()`; there, too, buffers are given back.
    """

    @property
    def blocks_host(self) -> bool:
        """Whether `wait` holds the calling thread. If not, only the device waits, and a failure is told by later calls."""

    @property
    def failure(self) -> Exception | None:
        """Why the lanes have stopped, if they have."""

    def open(self, lane: str, priority: str) -> None:
        """Make ready a lane of this priority ("high" or "normal"); once for each lane, before it is used."""

    def compute(self) -> AbstractContextManager[None]:
        """Inside, the calling thread issues to compute as the lanes see it; `submit`, `mark`, `wait`, `drain` belong there."""

    def submit(self, lane: str, task: Task, waits: Sequence[Token]) -> Token:
        """Queue `task` on `lane`."""

    def hold_back(self) -> None:
        """What is submitted from now on need not start before `hand_over`, or before compute waits for something."""

    def hand_over(self) -> None:
        """What was held back starts as soon as it may, and so does what is submitted from now on."""

    def mark(self) -> Token:
        """A token for the point that compute has reached."""

    def wait(self, tokens: Sequence[Token], why: str = "") -> None:
        """Make compute wait for the tokens; `why` names the interval of the wait."""

    def drain(self) -> None:
        """Make compute wait for all that is queued or running, whether or not it succeeds."""

    def take_intervals(self) -> tuple[Sequence[Interval], Sequence[Interval]]:
        """The communication ops, and the waits of compute, since the last call; a device is asked when they are read."""

    def fail(self, error: Exception) -> None:
        """Stop every lane; `error` is what every later call raises. The first failure wins."""

    def in_flight(self) -> tuple[tuple[str, float], ...]:
        """What is running, in words, each with the time since when (`time.perf_counter` seconds)."""

    def rest(self) -> None:
        """Compute is behind every lane and nothing is kept: the next backward may compute elsewhere."""

    def close(self) -> None:
        """End the lanes; queued tasks are dropped."""

    def let_go(self) -> Sequence[Ending]:
        """Nobody uses the lanes any more: let their threads end, without waiting.

        May be called in the midst of anything, by Python's collector: so it takes no lock.

        Returns:
            What waits for them.
        """


def timeout_error(task: object, elapsed_s: float) -> CollectiveTimeoutError:
    """The error of a collective that does not end; `task` in words."""
    return CollectiveTimeoutError(
        f"{task} did not end within {elapsed_s:.1f} s: "
        "a rank of that group did not reach it. Gradients of this step are not complete."
    )


def failure_of(task: object, error: Exception) -> Exception:
    """`error` with the task's name, unless it says enough."""
    if isinstance(error, ExecutionError):
        return error
    named = ExecutionError(f"{task} failed: {error}")
    named.__cause__ = error
    return named
