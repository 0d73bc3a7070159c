"""Copies around collectives: how many bytes a backward copies, and how fast memory is where it copies none."""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from commplan.ops import Axis, Kind
from commplan.plan.model import OpStep, Plan
from commplan.plan.wire import is_gathered_in_place, members_of, sent_as_it_lies

_NUM_COPIES: Final = 9
_MAX_BYTES: Final = 64 * 2**20


def copies_of(plan: Plan, *, packs_lone: bool) -> tuple[int, int]:
    """What a backward under `plan` packs (for reduce-scatters, and for all-reduces of what has no shard axis), and what it
    unpacks of gathered parameters.

    Args:
        packs_lone: see `commplan.language.profiles.Host`.
    """
    members, lies, packed, unpacked = members_of(plan), sent_as_it_lies(plan), 0, 0
    for step in plan.steps:
        # All pieces are copied with the first.
        if not isinstance(step, OpStep) or step.op.piece > 0:
            continue
        modules = members(step)
        if step.kind is Kind.ALL_GATHER and not is_gathered_in_place(step, modules):
            unpacked += sum(module.gathered_bytes for module in modules)
        elif step.kind is Kind.REDUCE_SCATTER and (packs_lone or not lies(step)):
            packed += sum(module.reduced_bytes for module in modules)
        elif step.kind is Kind.ALL_REDUCE:
            packed += sum(module.reduced_bytes for module in modules if Axis.SHARD not in module.axes)
    return packed, unpacked


def memory_bytes_per_s(size_bytes: int) -> float:
    """How fast this process copies `size_bytes`, of more than 64 MiB a part, into fresh memory of the host: the middle one of
    several times.
    """
    source = torch.zeros(min(max(size_bytes, 1), _MAX_BYTES), dtype=torch.uint8)
    taken_s = []
    for _ in range(_NUM_COPIES):
        begin_s = time.perf_counter()
        torch.empty_like(source).copy_(source)
        taken_s.append(time.perf_counter() - begin_s)
    return source.numel() / max(statistics.median(taken_s), 1e-9)
