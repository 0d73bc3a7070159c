"""Where a schedule leaves gathering to FSDP2, parameters are gathered in FSDP2's order and with its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

import commplan
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

WIDTHS = (3, 5, 6, 9, 11)


@dataclass
class Seen:
    """What backward did: elements of each all-gather in turn, whole parameters by module, and calls of FSDP2's own steps."""

    gathered: list[int] = field(default_factory=list)
    parameters: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    num_fsdp2: int = 0


def backward(model: Any, rank: int) -> Seen:
    seen = Seen()
    groups = [module._get_fsdp_state()._fsdp_param_group for module in (*model.b, model)]
    loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()).sum()

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, grad: object) -> None:
            seen.parameters[name] = [p.detach().clone() for p in module.parameters()]

        return hook

    def gathering(call: Callable[..., Any]) -> Callable[..., Any]:
        def gather(**kwargs: Any) -> Any:
            seen.gathered.append(kwargs["output_tensor"].numel())
            return call(**kwargs)

        return gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.num_fsdp2 += 1
        return _fsdp_collectives.foreach_all_gather(*args, **kwargs)

    handles = [block.register_full_backward_pre_hook(look(name)) for name, block in model.b.named_children()]
    comms = [group._all_gather_comm for group in groups]
    for group in groups:
        group._all_gather_comm = Noting(group._all_gather_comm, gathering(group._all_gather_comm))
    with patch.object(_fsdp_param_group, "foreach_all_gather", counted):
        loss.backward()
    for group, comm in zip(groups, comms, strict=True):
        group._all_gather_comm = comm
    for handle in handles:
        handle.remove()
    return seen


class Noting:
    """An all-gather that notes its calls."""

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self.allocate = original.allocate
        self.call = call

    def __call__(self, **kwargs: Any) -> Any:
        return self.call(**kwargs)


def split_along_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.size(1) % 2 == 0 else None


SHARDING: dict[str, dict[str, Any]] = {
    "plain": {},
    "parameters in bf16": {"bf16": True},
    "shards of columns": {"shard_placement_fn": split_along_columns},
    "whole after forward": {"reshard": False},
}


def sharded(here: Rank, shape: tuple[int, int] = (2, 2), **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return models.shard(models.Mlps(WIDTHS, head=7), here.mesh(shape), **kwargs)


def explicit(model: Any) -> None:
    model.set_modules_to_backward_prefetch([model.b[4], model.b[3]])
    model.b[4].set_modules_to_backward_prefetch([model.b[2]])
    model.b[3].set_modules_to_backward_prefetch([])


def async_gathers(model: Any) -> None:
    model._set_unshard_async_op(True)


PREPARED: dict[str, Callable[[Any], None]] = {
    "as sharded": lambda model: None,
    "prefetch by hand": explicit,
    "async": async_gathers,
}


def like_stock(here: Rank, kwargs: dict[str, Any], prepare: str) -> list[int]:
    stock, scheduled = sharded(here, **kwargs), sharded(here, **kwargs)
    PREPARED[prepare](stock)
    PREPARED[prepare](scheduled)
    counts = []
    with commplan.attach(scheduled, "overlapped_allreduce"):
        for _ in range(3):
            expected, found = backward(stock, here.rank), backward(scheduled, here.rank)
            assert found.gathered == expected.gathered
            assert found.parameters.keys() == expected.parameters.keys()
            for name, whole in expected.parameters.items():
                assert whole
                assert all(map(torch.equal, found.parameters[name], whole)), name
            assert expected.num_fsdp2 == len(expected.gathered)
            counts.append(found.num_fsdp2)
    again = backward(scheduled, here.rank)
    assert again.num_fsdp2 == len(again.gathered) == len(expected.gathered)
    return counts


@pytest.mark.parametrize("prepare", PREPARED)
@pytest.mark.parametrize("kwargs", SHARDING.values(), ids=SHARDING.keys())
def test_the_same_all_gathers_with_the_same_values(worlds: Worlds, kwargs: dict[str, Any], prepare: str) -> None:
    if "shard_placement_fn" in kwargs and prepare != "as sharded":
        pytest.skip("how shards lie and when they are gathered have nothing to do with each other")
    assert worlds.of(4).run(like_stock, kwargs=kwargs, prepare=prepare) == [[0, 0, 0]] * 4


def of_fewer_ranks(here: Rank) -> list[int]:
    """Resharded after forward over other ranks than before: FSDP2's own way."""
    stock, scheduled = (sharded(here, shape=(1, 4), reshard=2) for _ in range(2))
    with commplan.attach(scheduled, "overlapped_allreduce"):
        expected, found = backward(stock, here.rank), backward(scheduled, here.rank)
    assert found.gathered == expected.gathered
    assert all(all(map(torch.equal, found.parameters[name], whole)) for name, whole in expected.parameters.items())
    return [found.num_fsdp2, len(found.gathered)]


def test_shards_of_fewer_ranks_are_left_to_fsdp2(worlds: Worlds) -> None:
    for num_fsdp2, num_gathered in worlds.of(4).run(of_fewer_ranks):
        assert num_fsdp2 == num_gathered > 0


def replaced(here: Rank) -> list[str]:
    """Somebody's own method stays, and is called."""
    model = sharded(here)
    group = model.b[2]._get_fsdp_state()._fsdp_param_group
    calls: list[str] = []
    original = group.unshard

    def own(async_op: bool = False) -> None:
        calls.append("own")
        original(async_op)

    group.unshard = own
    with commplan.attach(model, "overlapped_allreduce"):
        backward(model, here.rank)
        assert group.unshard is own
    assert group.unshard is own
    return calls


def test_a_method_that_somebody_replaced_stays(worlds: Worlds) -> None:
    for calls in worlds.of(4).run(replaced):
        # In forward, before the module that comes first in backward, and in its own.
        assert calls.count("own") == 3


def restored(here: Rank) -> None:
    model = sharded(here)
    groups = [module._get_fsdp_state()._fsdp_param_group for module in (*model.b, model)]
    before = [dict(vars(group)).keys() for group in groups]
    with commplan.attach(model, "overlapped_allreduce"):
        assert all("unshard" in vars(group) for group in groups)
    assert [vars(group).keys() for group in groups] == before


def test_detach_takes_it_back(worlds: Worlds) -> None:
    worlds.of(4).run(restored)


def ranges(here: Rank) -> list[str]:
    model = sharded(here)
    with commplan.attach(model, "overlapped_allreduce"), profile(activities=[ProfilerActivity.CPU]) as profiler:
        backward(model, here.rank)
    return [event.name for event in profiler.events() if event.name.startswith("FSDP::pre_backward")]


def test_a_profiler_sees_pre_backwards(worlds: Worlds) -> None:
    for names in worlds.of(4).run(ranges):
        assert len(names) == len(WIDTHS) + 1
        assert "FSDP::pre_backward (b.3)" in names
