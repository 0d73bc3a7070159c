"""Ranges of a profiler: what commplan does, by name, in its traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from commplan.ops import OpId

Range = Callable[[str], AbstractContextManager[object]]
"""Makes a range of this name. Made for each op and each wait, so one that no profiler sees has to cost next to nothing."""

WAIT = "commplan::wait"


def op_range(op: OpId, module: str) -> str:
    """The name of an op's range."""
    return f"commplan::{op} ({module or '(root)'})"


def no_range(name: str) -> AbstractContextManager[object]:
    """Of no use to a profiler."""
    return nullcontext()


class GroupRanks:
    """The ranks of process groups; asked once for each group, since there may be thousands."""

    def __init__(self) -> None:
        self._known: dict[dist.ProcessGroup, tuple[int, ...]] = {}

    def of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """The global ranks, ascending by rank in the group."""
        if group not in self._known:
            self._known[group] = tuple(dist.get_process_group_ranks(group))
        return self._known[group]
