"""Threads that were told to end: what waits for them, with what they served, or when Python ends."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# How long a thread that was told to end is waited for: it looks up five times a second, less often where a machine is busy.
END_S = 2.0

# How long a thread is waited for that is in a collective when Python ends; one that takes longer is left behind.
AT_EXIT_S = 30.0


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Ending:
    """A thread that was told to end.

    One that comes back from torch while Python ends aborts the process.  It can't be told to come back before: the work of
    gloo's reduce-scatters, for one, waits for them whatever the limit of the wait (`LambdaWork` of torch's
    ProcessGroupGloo.cpp).

    It is held until Python ends where the thread does not end before: what it refers to may not lead to a model.

    Attributes:
        wake: called before it is waited for.
        returns_s: when it will be back from torch at the latest, in `time.perf_counter` seconds; None: it isn't there.
    """

    thread: threading.Thread
    wake: Callable[[], object] = _nothing
    returns_s: Callable[[], float | None] = _nothing

    def join(self) -> None:
        """Wait for it for a short time; what takes longer is waited for when Python ends."""
        self.wake()
        self.thread.join(END_S)
        if self.thread.is_alive():
            self.join_at_exit()

    def join_at_exit(self) -> None:
        """Have it waited for when Python ends."""
        atexit.register(outlast, [self])


def outlast(endings: Iterable[Ending]) -> None:
    """Python ends: wait until the threads are over, for `AT_EXIT_S` in all where some are in torch.

    Such a collective is over whenever a peer comes, or is gone; when at the latest says nothing but that no wait beyond helps.
    """
    deadline_s = time.perf_counter() + AT_EXIT_S
    for ending in endings:
        ending.wake()
        ending.thread.join(END_S)
        returns_s = ending.returns_s()
        if returns_s is not None:
            ending.thread.join(max(0.0, min(returns_s, deadline_s) - time.perf_counter()) + END_S)
