"""Random schedules with every attribute of the language: gradients of stock FSDP2, and no more memory than is declared."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import commplan
from commplan.errors import AttachError, ExecutionError
from commplan.language.modules import ModuleTable
from tests.mixtures import Mixture, mixture
from tests.worlds import models, parity, reference
from tests.worlds.test_parity import MIXED, assert_reached
from tests.worlds.world import Rank, Worlds

NUM_MIXTURES = 18
SEVERAL: parity.Step = [{"last": False}, {"last": False}, {"last": True}]


def mixtures(*counts: int) -> list[Mixture]:
    """Some that are right for these numbers of modules."""
    tables = [ModuleTable.uniform(count) for count in counts]
    return [mixture(seed, tables, ()) for seed in range(NUM_MIXTURES)]


def test_with_microbatches(worlds: Worlds) -> None:
    """FK, whose sums are whole numbers: it does not matter whether microbatches are added before or after their reduction."""
    schedules = [(mixed.text, {}) for mixed in mixtures(6)]
    arguments = {"name": "FK6", "shape": (2, 2), "steps": [SEVERAL, MIXED, parity.PLAIN], "sharding": {"reshard": True}}
    assert_reached(worlds.of(4).run(parity.compare, **arguments, schedules=schedules, lazy=True))


@pytest.mark.parametrize(("name", "bf16"), [("transformer", True), ("FN plain input", False)])
def test_step_by_step(worlds: Worlds, name: str, bf16: bool) -> None:
    schedules = [(mixed.text, {}) for mixed in mixtures(3, 4) if not mixed.ar_is_last]
    arguments = {"name": name, "shape": (2, 2), "steps": [parity.PLAIN, MIXED], "sharding": {"reshard": True, "bf16": bf16}}
    worlds.of(4).run(parity.compare, **arguments, schedules=schedules, lazy=name == "transformer")


def warnings_of(here: Rank, says_so: bool) -> list[str]:
    """What is logged where two backwards belong to one step, twice."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commplan").addHandler(handler)
    model = models.shard(models.fk(2), here.mesh((2, 2)))
    with commplan.attach(model, "last_microbatch_allreduce"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            for i in range(2):
                model.set_is_last_backward(not says_so or i == 1)  # type: ignore[operator]
                ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
            assert reference.values(model) == [5.0, 10.0]
            optimizer.step()
            optimizer.zero_grad()
    logging.getLogger("commplan").removeHandler(handler)
    return told


@pytest.mark.parametrize("says_so", [True, False])
def test_a_loop_that_never_says_which_backward_is_last_is_told_so_once(worlds: Worlds, says_so: bool) -> None:
    for told in worlds.of(4).run(warnings_of, says_so=says_so):
        assert [("set_is_last_backward(False)" in message) for message in told] == [True] * (not says_so)


def refused_prefetch(here: Rank) -> tuple[str, list[float | None]]:
    model = models.shard(models.fk(3), here.mesh((2, 2)))
    blocks: list[nn.Module] = list(model.children())
    blocks[2].set_modules_to_backward_prefetch([blocks[1]])  # type: ignore[operator]
    with pytest.raises(AttachError) as refusal:
        commplan.attach(model, "prefetch_overlap")
    blocks[2].set_modules_to_backward_prefetch([])  # type: ignore[operator]
    with commplan.attach(model, "prefetch_overlap"):
        ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
    return str(refusal.value), list(reference.values(model))


def test_prefetch_that_a_user_asked_fsdp2_for_is_refused(worlds: Worlds) -> None:
    for message, values in worlds.of(4).run(refused_prefetch):
        assert "module '2' was told what to gather ahead in backward" in message
        assert values == [2.5, 5.0, 7.5]


SENDS_FP16 = """
version: 1
name: sends_fp16
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n, dtype: fp16}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
"""


def detached_between(here: Rank) -> tuple[str, list[float | None]]:
    model = models.shard(models.fk(2), here.mesh((2, 2)))
    attachment = commplan.attach(model, SENDS_FP16)
    model.set_requires_all_reduce(False)  # type: ignore[operator]
    ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
    with pytest.raises(ExecutionError) as refusal:
        attachment.detach()
    model.set_requires_all_reduce(True)  # type: ignore[operator]
    ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
    values = list(reference.values(model))
    attachment.detach()
    return str(refusal.value), values


def test_partial_sums_that_fsdp2_would_divide_again_are_not_handed_back(worlds: Worlds) -> None:
    for message, values in worlds.of(4).run(detached_between):
        assert "between microbatches under a schedule that sends fp16" in message
        assert values == [5.0, 10.0]
