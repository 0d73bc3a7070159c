"""Ranks that do different things, under every schedule: an error on all of them, or zero-filled means where asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commplan
from commplan.fsdp2 import Options
from tests.faults.test_rank_checks import diverges
from tests.worlds import features, models, parity, reference
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]
OPTIONS = Options(timeout_s=60)


def different_parameters(here: Rank, uses: list[str], rank_checks: str) -> dict[str, str]:
    said = {}
    for schedule, params in parity.LIBRARY:
        model = models.pair(here.mesh((2, 2)))
        model.uses = uses[here.rank]

        def backward(model: Any = model) -> None:
            model(FN.batch(here.rank, 0)).sum().backward()

        said[schedule] = diverges(model, backward, schedule=schedule, options=OPTIONS, rank_checks=rank_checks, **params)
    return said


@pytest.mark.report("pytorch#158719", "pytorch#170667", "torchtitan#2747")
def test_different_parameters_of_a_group(worlds: Worlds) -> None:
    found = worlds.of(4).run(different_parameters, uses=["a", "ac", "a", "ac"], rank_checks="always")
    for rank, of_rank in enumerate(found):
        group = "[0, 1]" if rank < 2 else "[2, 3]"
        for schedule, message in of_rank.items():
            assert f"module '(root)' on the group of ranks {group} did not begin" in message, schedule
            assert re.search(r"rank\(s\) 1, 3 have .* where rank\(s\) 0, 2 have", message), schedule


@pytest.mark.report("pytorch#75902", "pytorch#75373")
@pytest.mark.parametrize("rank_checks", ["backward", "always"])
def test_equal_shapes_of_different_parameters(worlds: Worlds, rank_checks: str) -> None:
    for of_rank in worlds.of(4).run(different_parameters, uses=["a", "a", "c", "c"], rank_checks=rank_checks):
        for schedule, message in of_rank.items():
            assert re.search(r"rank\(s\) 2, 3 have .* where rank\(s\) 0, 1 have", message), schedule


def zero_filled(here: Rank, uses: list[str]) -> None:
    def backward(model: nn.Module, rank: int) -> None:
        model.uses = uses[rank]  # type: ignore[assignment]
        model(FN.batch(rank, 0)).sum().backward()

    right = reference.gradients(models.Pair, here.size, backward)
    for schedule, params in parity.LIBRARY:
        model = models.pair(here.mesh((2, 2)))
        model.set_reduce_scatter_unused_params(True)
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for _ in range(2):
                backward(model, here.rank)
                reference.assert_close(model, right, 1e-5)
                model.zero_grad()


@features.reduced_unused_params
@pytest.mark.report("pytorch#158719", "pytorch#170667", "torchtitan#2747", "pytorch#75902", "pytorch#75373")
@pytest.mark.parametrize("uses", [["a", "ac", "a", "ac"], ["a", "a", "c", "c"]])
def test_zero_filled_means(worlds: Worlds, uses: list[str]) -> None:
    worlds.of(4).run(zero_filled, uses=uses)


def unequal_counts(here: Rank, counts: list[int], flag: str) -> dict[str, str]:
    """The replicas run unequal numbers of microbatches before the one that reduces."""
    said = {}
    for schedule, params in parity.LIBRARY:
        model = models.shard(models.fk(3), here.mesh((2, 2)))

        def backward(model: nn.Module = model) -> None:
            for i in range(counts[here.rank] + 1):
                parity.set_flags(model, {flag: i == counts[here.rank]})
                model(torch.zeros(1, requires_grad=True)).sum().backward()

        said[schedule] = diverges(model, backward, schedule=schedule, options=OPTIONS, **params)
    return said


@pytest.mark.report("unequal numbers of microbatches")
def test_unequal_numbers_of_microbatches(worlds: Worlds) -> None:
    for of_rank in worlds.of(4).run(unequal_counts, counts=[2, 2, 3, 3], flag="sync"):
        for schedule, message in of_rank.items():
            assert re.search(r"'backward (3|4)' where .* have 'backward (4|3)'", message), schedule


def users_collectives(here: Rank) -> None:
    """On every group that the model's mesh has, between microbatches and in hooks while lanes are busy."""
    mesh = here.mesh((2, 2))
    for schedule, params in parity.SCHEDULES:
        sums: list[float] = []

        def reduce_all(*_: Any, sums: list[float] = sums) -> None:
            for group in (mesh.get_group("shard"), mesh.get_group("replicate"), dist.group.WORLD):
                mine = torch.ones(3)
                dist.all_reduce(mine, group=group)
                sums.append(mine[0].item())

        model = models.shard(models.fk(3), mesh)
        for block in model:  # type: ignore[attr-defined]
            block.register_full_backward_hook(reduce_all)
        with commplan.attach(model, schedule, options=OPTIONS, **params):
            for flags in parity.NO_ALL_REDUCE:
                parity.set_flags(model, flags)
                ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
                reduce_all()
        assert reference.values(model) == [7.5, 15.0, 22.5], schedule
        assert sums == [2.0, 2.0, 4.0] * (3 * 3 + 3), schedule


@pytest.mark.report("collectives of the user between microbatches")
def test_collectives_of_the_user(worlds: Worlds) -> None:
    worlds.of(4).run(users_collectives)
