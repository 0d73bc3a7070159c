"""When what a hook issued goes to its lanes: at once, or when the hook that follows is through."""

from __future__ import annotations

import time
from typing import Final

from commplan.execute.lanes import Lanes

SHORT_S: Final = 1e-3
"""What is held back for less than this in one backward is held back in the next."""


class Rhythm:
    """Lets lanes start as compute begins, where hooks follow each other so soon that nothing is lost by it.

    The workers of a CPU share Python's lock with the thread of backward.  One that wakes while that thread is in a hook takes
    the lock, or is refused it, at nearly every call of torch there, and each change of threads costs tens of microseconds; one
    that wakes as compute begins finds it free.  So what is issued after compute of a module is held until the hook before
    compute of the next one ends, provided that this took less than `SHORT_S` in the backward before: modules are small there.
    A wait of compute ends it, too.

    A framework need not tell any of this: ops start at once then.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._is_short: dict[int, bool] = {}
        self._left: tuple[int, float] | None = None

    def enter(self, module: int) -> None:
        """The hook after compute of `module` begins."""
        self.break_off()
        if self._is_short.get(module, False):
            self._lanes.hold_back()

    def leave(self, module: int) -> None:
        """The hook after compute of `module` ends."""
        self._left = module, time.perf_counter()

    def hand_over(self) -> None:
        """The hook before compute of a module ends, or is about to wait for something that lanes don't know of."""
        if self._left is not None:
            module, left_s = self._left
            self._is_short[module] = time.perf_counter() - left_s < SHORT_S
            self._left = None
        self._lanes.hand_over()

    def break_off(self) -> None:
        """Another hook comes than before compute of a module: it may have been long in coming."""
        if self._left is not None:
            self._is_short[self._left[0]] = False
            self._left = None
        self._lanes.hand_over()
