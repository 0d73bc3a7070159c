"""State dicts and distributed checkpoints of a model that a schedule drives are those of the model alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import commplan
from tests.models.comparing import Case, adamw, local, on_input, train
from tests.worlds import models, parity
from tests.worlds.world import Rank, Worlds

CASE = Case(models.Net, on_input, optimizer=adamw)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, here: Rank, number: int) -> None:
    on_input(model, here.rank, number)
    optimizer.step()
    optimizer.zero_grad()


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """A nested state dict as one dict of paths."""
    if isinstance(state, dict):
        found: dict[str, Any] = {}
        for key, value in state.items():
            found |= flat(value, f"{prefix}/{key}")
        return found
    return {prefix: local(state) if isinstance(state, torch.Tensor) else state}


def assert_same(one: Any, other: Any) -> None:
    """State dicts of equal keys in equal order, equal values, equal placements."""
    mine, theirs = flat(one), flat(other)
    assert list(mine) == list(theirs)
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key], key


def state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every kind of state dict that torch knows."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    sharded = get_state_dict(model, optimizer)
    return {
        "plain": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sharded": {"model": sharded[0], "optimizer": sharded[1]},
        "whole": get_model_state_dict(model, options=whole),
    }


def unchanged(here: Rank) -> None:
    """attach, steps and detach change no key, and values only as steps of stock FSDP2 do."""
    stock, driven = CASE.fresh(here), CASE.fresh(here)
    stock_optimizer, optimizer = adamw(stock), adamw(driven)
    assert_same(state_dicts(driven, optimizer), state_dicts(stock, stock_optimizer))
    attachment = commplan.attach(driven, "delayed_allreduce", options=parity.LAZY)
    assert_same(state_dicts(driven, optimizer), state_dicts(stock, stock_optimizer))
    for number in range(2):
        step(stock, stock_optimizer, here, number)
        step(driven, optimizer, here, number)
        assert_same(state_dicts(driven, optimizer), state_dicts(stock, stock_optimizer))
    attachment.detach()
    assert_same(state_dicts(driven, optimizer), state_dicts(stock, stock_optimizer))


def test_state_dicts_do_not_change(worlds: Worlds) -> None:
    worlds.of(4).run(unchanged)


def shared_folder(here: Rank) -> str:
    """A new folder that all ranks know."""
    path = [tempfile.mkdtemp() if here.rank == 0 else ""]
    dist.broadcast_object_list(path)
    return path[0]


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    held = {"model": state, "optimizer": optimizer_state}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])


def resumed(here: Rank, saver_is_driven: bool, loader_is_driven: bool, ways: int) -> None:
    """Saved after two steps, loaded into another model of other values, and trained on: as if it had never stopped."""
    expected = list(train(CASE, CASE.fresh(here), here))
    folder = Path(shared_folder(here)) / "checkpoint"

    def attached(model: nn.Module, is_driven: bool) -> Callable[[], None]:
        return commplan.attach(model, "pipelined_allreduce", options=parity.LAZY).detach if is_driven else lambda: None

    saver = CASE.fresh(here)
    optimizer = adamw(saver)
    detach = attached(saver, saver_is_driven)
    for number in range(2):
        step(saver, optimizer, here, number)
    save(saver, optimizer, folder)
    detach()
    torch.manual_seed(7)
    loader = models.shard(models.Net(), here.mesh((ways, 4 // ways)))
    optimizer = adamw(loader)
    detach = attached(loader, loader_is_driven)
    # In mid-training: buffers and lanes exist already.
    step(loader, optimizer, here, 5)
    load(loader, optimizer, folder)
    on_input(loader, here.rank, 2)
    if ways == 2:
        found = {f"{n}.grad": local(p.grad) for n, p in loader.named_parameters()}
        parity.assert_equal(found, {name: expected[4][name] for name in found}, "resumed")
        optimizer.step()
        found = {n: local(p) for n, p in loader.named_parameters()}
        parity.assert_equal(found, {name: expected[5][name] for name in found}, "resumed, stepped")
    else:
        whole = CASE.fresh(here)
        whole_optimizer = adamw(whole)
        load(whole, whole_optimizer, folder)
        on_input(whole, here.rank, 2)
        for mine, stock in zip(loader.parameters(), whole.parameters(), strict=True):
            assert (mine.grad.full_tensor() - stock.grad.full_tensor()).abs().max() <= 1e-6
    detach()


@pytest.mark.parametrize(
    ("saver_is_driven", "loader_is_driven", "ways"), [(True, False, 2), (False, True, 2), (True, True, 2), (True, True, 1)]
)
def test_checkpoints(worlds: Worlds, saver_is_driven: bool, loader_is_driven: bool, ways: int) -> None:
    """The last one is loaded on another mesh, without replicas."""
    worlds.of(4).run(resumed, saver_is_driven=saver_is_driven, loader_is_driven=loader_is_driven, ways=ways)


def broadcast_from_one(here: Rank) -> None:
    """A whole state dict that only rank 0 has."""
    expected = list(train(CASE, CASE.fresh(here), here))
    torch.manual_seed(0)
    whole = models.Net().state_dict() if here.rank == 0 else {}
    torch.manual_seed(3)
    model = models.shard(models.Net(), here.mesh((2, 2)))
    with commplan.attach(model, "pipelined_allreduce", options=parity.LAZY):
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        for number, (mine, stock) in enumerate(zip(train(CASE, model, here), expected, strict=True)):
            parity.assert_equal(mine, stock, f"step {number // 2}")


def test_loading_from_one_rank(worlds: Worlds) -> None:
    worlds.of(4).run(broadcast_from_one)


def between_microbatches(here: Rank) -> None:
    """Saved while partial sums wait for their all-reduce: the step that follows is not disturbed."""

    def trained(schedule: str | None) -> list[torch.Tensor]:
        model = CASE.fresh(here)
        attachment = commplan.attach(model, schedule, options=parity.LAZY) if schedule else None
        for i in range(3):
            parity.set_flags(model, {"all_reduce": i == 2})
            on_input(model, here.rank, i)
            get_model_state_dict(model)
            model.state_dict()
        grads = [local(p.grad) for p in model.parameters()]
        if attachment is not None:
            attachment.detach()
        return grads

    for mine, stock in zip(trained("pipelined_allreduce"), trained(None), strict=True):
        assert torch.equal(mine, stock)


def test_saving_between_microbatches(worlds: Worlds) -> None:
    worlds.of(4).run(between_microbatches)
