"""Waits of the host for collectives that can be given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

# A thread that waits longer than this in torch can't be ended with the process in peace.
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
