"""Copies around collectives: how many bytes a backward copies, and how fast memory is where it copies none."""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from commplan.ops import Axis, Kind
from commplan.plan.model import OpStep, Plan
from commplan.plan.wire import lies_as_sent, members_of

_NUM_COPIES: Final = 9


def copies_of(plan: Plan, *, copies_lone: bool) -> tuple[int, int]:
    """What a backward under `plan` packs (for reduce-scatters, and for all-reduces of what has no shard axis), and what it
    unpacks of gathered parameters.

    Args:
        copies_lone: see `commplan.language.profiles.Host`.
    """
    members, packed, unpacked = members_of(plan), 0, 0
    for step in plan.steps:
        # All pieces are copied with the first.
        if not isinstance(step, OpStep) or step.op.piece > 0 or (not copies_lone and lies_as_sent(step, members(step))):
            continue
        for module in members(step):
            if step.kind is Kind.ALL_GATHER:
                unpacked += module.gathered_bytes
            elif step.kind is Kind.REDUCE_SCATTER or (step.kind is Kind.ALL_REDUCE and Axis.SHARD not in module.axes):
                packed += module.reduced_bytes
    return packed, unpacked


def memory_bytes_per_s(size_bytes: int) -> float:
    """How fast this process copies `size_bytes` into fresh memory of the host: the middle one of several times."""
    source = torch.zeros(max(size_bytes, 1), dtype=torch.uint8)
    taken_s = []
    for _ in range(_NUM_COPIES):
        begin_s = time.perf_counter()
        torch.empty_like(source).copy_(source)
        taken_s.append(time.perf_counter() - begin_s)
    return source.numel() / max(statistics.median(taken_s), 1e-9)
