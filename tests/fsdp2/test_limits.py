"""What begins on a gloo group of FSDP2's may get a shorter limit than the group has, and nothing else does."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commplan.fsdp2 import torch_faults
from tests.worlds.world import Rank, Worlds

SHORT, LONG = timedelta(seconds=7), timedelta(hours=9)


def limits(here: Rank) -> list[bool]:
    """Whether a group has its own limit: inside a shorter and a longer one, behind them, behind one that raised."""
    group = here.mesh((2, 2)).get_group("shard")
    backend: Any = group._get_backend(torch.device("cpu"))
    own = backend.options._timeout
    assert SHORT < own < LONG
    seen = []
    for limit in (SHORT, LONG):
        with torch_faults._limited(group, limit):
            seen.append(backend.options._timeout == own)
        seen.append(backend.options._timeout == own)
    with contextlib.suppress(KeyError), torch_faults._limited(group, SHORT):
        raise KeyError
    seen.append(backend.options._timeout == own)
    return seen


def test_a_limit_holds_inside_where_it_is_shorter(worlds: Worlds) -> None:
    assert worlds.of(4).run(limits) == [[False, True, True, True, True]] * 4


def test_a_group_without_a_backend_has_none() -> None:
    """As one that a user wrote in Python."""
    with torch_faults._limited(dist.ProcessGroup(0, 1), SHORT):
        pass
