"""Waits of the host for collectives: such as can be given up, and such as no lane knows of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from commplan.ops import COMPUTE_LANE
from commplan.sight.intervals import Interval

# How often a thread that waits in torch looks whether it is to end.
SLICE_S = 0.2
_SLICE = timedelta(seconds=SLICE_S)


def wait_in_slices(work: dist.Work, timeout_s: float, is_given_up: Callable[[], bool]) -> bool:
    """Wait for `work`, and look now and then whether it is given up.

    Returns:
        False when it is, or when the time is over.

    Raises:
        RuntimeError: the work failed.
    """
    deadline_s = time.perf_counter() + timeout_s
    while True:
        begin_s = time.perf_counter()
        slice_s = max(0.001, min(SLICE_S, deadline_s - begin_s))
        try:
            work.wait(_SLICE if slice_s == SLICE_S else timedelta(seconds=slice_s))
            return True
        except RuntimeError:
            now_s = time.perf_counter()
            # An error that comes before the end of the slice is the work's own.
            if now_s - begin_s < slice_s * 0.99:
                raise
            if now_s >= deadline_s or is_given_up():
                return False


class HostWaits:
    """When the host waited in a backward for collectives that are not the plan's, and compute with it.

    Args:
        counts: whether compute stands still while the host does.
    """

    def __init__(self, *, counts: bool) -> None:
        self._counts = counts
        self._waits: list[Interval] = []

    def add(self, why: str, begin_s: float, end_s: float) -> None:
        """The host waited for `why`, in words; `time.perf_counter` seconds."""
        if self._counts:
            self._waits.append(Interval(why, COMPUTE_LANE, begin_s, end_s))

    def begin_s(self, now_s: float) -> float:
        """When a backward began whose first hook runs now: a forward that is run again may have waited before."""
        return min([now_s, *(wait.begin_s for wait in self._waits)])

    def among(self, waits: Sequence[Interval]) -> Sequence[Interval]:
        """`waits` of compute for the plan, and these, as they began."""
        return sorted((*waits, *self._waits), key=lambda wait: wait.begin_s) if self._waits else waits

    def clear(self) -> None:
        """A backward ended, or none came: what is added later belongs to another."""
        self._waits.clear()
