"""What an executor is made of, so that each part can be replaced."""

from __future__ import annotations

import atexit
from dataclasses import dataclass

from commplan.execute.control import Control
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

    def let_go(self) -> None:
        """Nobody uses this any more, and nobody ended it: let its threads end. See `Lanes.let_go`."""
        joins = [*self.lanes.let_go()]
        if self.control is not None:
            joins.append(self.control.let_go())
        if self.lookout is not None:
            joins += self.lookout.let_go()
        for join in joins:
            # A thread that is in torch still when Python ends would abort the process.
            atexit.register(join)
