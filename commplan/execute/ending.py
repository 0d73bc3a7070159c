"""Threads that were told to end: what waits for them, with what they served, or when Python ends."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# How long a thread that was told to end is waited for: it looks up five times a second, less often where a machine is busy.
END_S = 2.0

# A thread that is in a collective for longer is left behind when Python ends, which takes a few seconds itself.
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
        atexit.register(self.outlast)

    def outlast(self) -> None:
        """Python ends: wait until the thread is over, or is sure to be in torch for much longer than that takes."""
        self.wake()
        self.thread.join(END_S)
        returns_s = self.returns_s()
        if returns_s is not None and (left_s := returns_s - time.perf_counter()) < AT_EXIT_S:
            self.thread.join(max(0.0, left_s) + END_S)
