"""What an executor is made of, so that each part can be replaced."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass

from commplan.execute.control import Control
from commplan.execute.ending import Ending, outlast
from commplan.execute.lanes import Lanes
from commplan.execute.lookout import Lookout
from commplan.execute.memory import Memory
from commplan.execute.ranges import Range, no_range


@dataclass(frozen=True, slots=True)
class Machinery:
    """What an executor works with.

    Attributes:
        control: None where ranks need not be compared.
        compares_reductions: whether ranks agree on the parameters of each reduction before it begins.
        lookout: tells in errors where other ranks are.
        make_range: makes the ranges that a profiler shows, around each op and each wait of compute.
    """

    lanes: Lanes
    memory: Memory
    control: Control | None
    compares_reductions: bool = False
    lookout: Lookout | None = None
    make_range: Range = no_range

    def let_go(self) -> Sequence[Ending]:
        """Nobody uses this any more: let its threads end. See `Lanes.let_go`."""
        endings = [*self.lanes.let_go()]
        if self.control is not None:
            endings.append(self.control.let_go())
        if self.lookout is not None:
            endings += self.lookout.let_go()
        return endings

    def let_go_unattended(self) -> None:
        """Nobody uses this any more, and nobody ended it."""
        atexit.register(outlast, self.let_go())

    def close(self) -> None:
        """End the lanes and every thread."""
        if self.control is not None:
            # First, since a worker may wait for what ranks agree on.
            self.control.let_go()
        self.lanes.close()
        if self.control is not None:
            self.control.close()
        if self.lookout is not None:
            self.lookout.close()

    def close_at_exit(self) -> None:
        """Python ends, and nobody ended this."""
        self.close()
        outlast(self.let_go())
