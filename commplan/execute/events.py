"""Events of a device, given out again only when nothing on host or device can ask for them any more.

A device may let a wait that was issued see a later record of its event (HCCL documents so), so an event is not recorded
anew until the device has passed all that was issued in its backward, waits included.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

# Backwards whose events are kept for later ones: the host may run ahead of the device by some.
MAX_RETIRED = 4


class Reader(Protocol):
    """Reads the events of one backward after it, or has read them."""

    @property
    def is_done(self) -> bool:
        """Whether it will not ask any event again."""


@dataclass(slots=True)
class _Lot:
    """The events of one backward, by whether they keep time."""

    plain: list[Any] = field(default_factory=list)
    timed: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class _Retired:
    """A backward that was issued: `fence` is behind all of it, `reader` may still ask."""

    number: int
    lot: _Lot
    fence: Any
    reader: weakref.ref[Any]

    @property
    def is_read(self) -> bool:
        reader = self.reader()
        return reader is None or reader.is_done


class EventPool:
    """Gives out events of `module`, a device module of torch.

    Attributes:
        lot: the number of the backward for which events are given out.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._free = _Lot()
        self._used = _Lot()
        self._retired: deque[_Retired] = deque()
        self.lot = 0

    def take(self, *, timed: bool = False) -> Any:
        """An event that nobody waits for; `timed` ones have `elapsed_time`."""
        free, used = (self._free.timed, self._used.timed) if timed else (self._free.plain, self._used.plain)
        event = free.pop() if free else self._module.Event(enable_timing=timed)
        used.append(event)
        return event

    def retire(self, fence: Any, reader: Reader) -> None:
        """A backward is issued. `fence` is an event of nobody else, recorded behind everything that used its events."""
        self._retired.append(_Retired(self.lot, self._used, fence, weakref.ref(reader)))
        self.forget()
        if len(self._retired) > MAX_RETIRED:
            self._retired.popleft()

    def forget(self) -> None:
        """Never give out again what was taken since the last `retire`."""
        self._used = _Lot()
        self.lot += 1

    def reclaim(self) -> int:
        """Take back what is free.

        Returns:
            The last backward of which some events were taken back, so that it is over; -1 if none.
        """
        last = -1
        waiting: deque[_Retired] = deque()
        for retired in self._retired:
            if retired.is_read and retired.fence.query():
                self._free.plain.extend(retired.lot.plain)
                self._free.timed.extend(retired.lot.timed)
                last = retired.number
            else:
                waiting.append(retired)
        self._retired = waiting
        return last
