"""When what a hook issued goes to its lanes: at once, or when the hook that follows is through."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Final

from commplan.execute.lanes import Lanes

SHORT_S: Final = 1e-3
"""What is held back for less than this in one backward is held back in the next."""

STRIKES: Final = 3
"""A module whose ops were late so often, since they were held back or would have been, is trusted no more."""

FORGIVEN: Final = 100
"""So many short ones in a row, and it is trusted again: a busy machine makes anything late now and then."""


@dataclass(slots=True)
class _Record:
    """How soon the next hook followed after compute of one module."""

    in_row: int = 0
    strikes: int = 0

    @property
    def is_trusted(self) -> bool:
        return self.in_row > 0 and self.strikes < STRIKES

    def add(self, *, is_short: bool) -> None:
        if not is_short:
            self.in_row = 0
            self.strikes += 1
            return
        self.in_row += 1
        if self.in_row % FORGIVEN == 0:
            self.strikes = 0


class Rhythm:
    """Lets lanes start as compute begins, where hooks follow each other so soon that nothing is lost by it.

    The workers of a CPU share Python's lock with the thread of backward.  One that wakes while that thread is in a hook takes
    the lock, or is refused it, at nearly every call of torch there, and each change of threads costs tens of microseconds; one
    that wakes as compute begins finds it free.  So what is issued after compute of a module is held back until the hook before
    compute of the next one ends, provided that this took less than `SHORT_S` when compute of the module last ended: modules
    are small there.  A wait of compute lets lanes start, too.  Where hooks follow each other now soon and now late, as with a
    module that is used twice, this is given up.

    A framework need not tell any of this: ops start at once then.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._records: dict[int, _Record] = {}
        self._left: tuple[_Record, float] | None = None

    def enter(self, module: int) -> None:
        """The hook after compute of `module` begins."""
        self.break_off()
        if self._record(module).is_trusted:
            self._lanes.hold_back()

    def leave(self, module: int) -> None:
        """The hook after compute of `module` ends."""
        self._left = self._record(module), perf_counter()

    def hand_over(self) -> None:
        """The hook before compute of a module ends, or is about to wait for something that lanes don't know of."""
        if self._left is not None:
            record, left_s = self._left
            record.add(is_short=perf_counter() - left_s < SHORT_S)
            self._left = None
        self._lanes.hand_over()

    def break_off(self) -> None:
        """Something else comes than the hook before compute of a module, and may have been long in coming."""
        if self._left is not None:
            self._left[0].add(is_short=False)
            self._left = None
        self._lanes.hand_over()

    def _record(self, module: int) -> _Record:
        record = self._records.get(module)
        if record is None:
            record = self._records[module] = _Record()
        return record
