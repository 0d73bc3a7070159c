"""Attach on top of a vendor that wraps parts of FSDP2 before the model is built, as torch-npu does."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from tests.worlds import parity
from tests.worlds.world import Rank, Worlds

WRAPPED = (
    (_fsdp_param_group.FSDPParamGroup, "__init__"),
    (_fsdp_param_group, "foreach_reduce"),
    (_fsdp_collectives.DefaultReduceScatter, "allocate"),
    (_fsdp_collectives.DefaultAllGather, "allocate"),
)


def wrapped(here: Rank, keeps_name: bool) -> dict[str, int]:
    """Every schedule against stock FSDP2, both wrapped; how often each wrapper ran."""
    calls: Counter[str] = Counter()

    def wrapper_of(original: Any, name: str) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return functools.wraps(original)(wrapper) if keeps_name else wrapper

    with ExitStack() as stack:
        for owner, name in WRAPPED:
            stack.enter_context(patch.object(owner, name, wrapper_of(getattr(owner, name), name)))
        steps = [parity.PLAIN, parity.NO_ALL_REDUCE]
        parity.compare(
            here,
            name="FN",
            shape=(2, 2),
            steps=steps,
            sharding={"bf16": True},
            schedules=parity.LIBRARY if keeps_name else parity.DIFFERENT,
        )
    return dict(calls)


def test_wrappers_that_keep_names(worlds: Worlds) -> None:
    for calls in worlds.of(4).run(wrapped, keeps_name=True):
        assert calls["__init__"] == 4 * (1 + len(parity.LIBRARY))
        # Only by stock FSDP2: four groups, four backwards.
        assert calls["foreach_reduce"] == 4 * 4
        assert calls["allocate"] > 0


def test_wrappers_that_do_not(worlds: Worlds) -> None:
    assert all(calls["foreach_reduce"] == 16 for calls in worlds.of(4).run(wrapped, keeps_name=False))
