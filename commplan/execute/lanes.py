"""Lanes: in-order queues on which ops run beside compute. What a kind of device has to provide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist


class Token(Protocol):
    """Stands for the end of one task."""


@dataclass(frozen=True, slots=True)
class Task:
    """One op as a lane runs it.

    Attributes:
        op: the op's name in the plan, with the module and the group in words for messages.
        start: begins the op; returns the collective's handle, or None if it is over or there is none.
        finish: what remains to be done on the lane when the collective is complete.
        is_communication: whether its time counts as communication in reports.
        patience_s: time that it may take beyond the timeout, so that another op's timeout is told first.
    """

    op: str
    module: str
    group: str
    start: Callable[[], dist.Work | None]
    finish: Callable[[], None]
    is_communication: bool = True
    patience_s: float = 0.0

    def __str__(self) -> str:
        return " ".join([self.op, *([f"of module {self.module!r}"] if self.module else []), f"on {self.group}"])


@dataclass(frozen=True, slots=True)
class Interval:
    """One op on its lane, or one wait of compute (lane "compute"); `time.perf_counter` seconds."""

    op: str
    lane: str
    begin_s: float
    end_s: float


class Lanes(Protocol):
    """The lanes of one attachment.

    A submitted task starts when compute has reached the point of submission, every token in `waits` is complete, and the
    task before it on its lane is over.  After a failure every call raises it.
    """

    @property
    def failure(self) -> Exception | None:
        """Why the lanes have stopped, if they have."""

    def submit(self, lane: str, task: Task, waits: Sequence[Token]) -> Token:
        """Queue `task` on `lane`."""

    def mark(self) -> Token:
        """A token for the point that compute has reached."""

    def wait(self, tokens: Sequence[Token]) -> None:
        """Make compute wait for the tokens."""

    def drain(self) -> None:
        """Return when nothing is queued or running, whether or not it succeeded."""

    def take_intervals(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """The communication ops, and the waits of compute, since the last call."""

    def close(self) -> None:
        """End the lanes; queued tasks are dropped."""
