"""Gradients that were fused, chunked or sent in another dtype are as near to an fp64 reference as the plan says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import commplan
from commplan.language.modules import ModuleTable
from commplan.plan.accuracy import ROUNDOFF, gradient_error_factor
from tests.mixtures import mixture
from tests.worlds import models, parity
from tests.worlds.world import Rank, Worlds

NUM_MIXTURES = 24
SCHEDULES = ("bucketed_allreduce", "shrunken_tail", "chunked", "low_precision_reduce_scatter", "last_microbatch_allreduce")


def build() -> nn.Module:
    return models.Mlps([8, 5, 12, 8], head=6)


def batch(rank: int, i: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + i)).requires_grad_()


def summands(num_ranks: int, num_backwards: int) -> dict[str, torch.Tensor]:
    """Whole gradients of each rank and microbatch, as autograd leaves them: shape (ranks, microbatches, *parameter), fp64."""
    torch.manual_seed(0)
    model = build()
    found: dict[str, list[list[torch.Tensor]]] = {name: [] for name, _ in model.named_parameters()}
    for rank in range(num_ranks):
        for of_rank in found.values():
            of_rank.append([])
        for i in range(num_backwards):
            model.zero_grad()
            model(batch(rank, i)).square().sum().backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                found[name][-1].append(p.grad.double().clone())
    return {name: torch.stack([torch.stack(of_rank) for of_rank in grads]) for name, grads in found.items()}


def largest_errors(here: Rank, shape: tuple[int, int], schedules: list[str], num_backwards: int) -> list[tuple[float, float]]:
    """For each schedule the largest error of an element, and the one nearest to its bound as a part of that."""
    exact = summands(here.size, num_backwards)
    found = []
    for schedule in schedules:
        torch.manual_seed(0)
        model = models.shard(build(), here.mesh(shape))
        with commplan.attach(model, schedule, options=parity.EAGER) as attachment:
            for i in range(num_backwards):
                is_last = i == num_backwards - 1
                parity.set_flags(model, {"last": is_last})
                model(batch(here.rank, i)).square().sum().backward()
            plan = attachment.plan
        factor_of = {
            p.name: gradient_error_factor(plan, n, num_backwards=num_backwards)
            for n, module in enumerate(plan.modules.modules)
            for p in module.parameters
        }
        off, part = 0.0, 0.0
        for name, p in model.named_parameters():
            error = (p.grad.full_tensor().double() - exact[name].sum(1).mean(0)).abs()  # type: ignore[union-attr]
            bound = factor_of[name] * exact[name].abs().sum(1).mean(0)
            assert bool((error <= bound).all()), f"{name} under {schedule}: {(error / bound).max()} of the bound"
            off, part = max(off, float(error.max())), max(part, float((error / bound.clamp_min(1e-30)).max()))
        found.append((off, part))
    return found


@pytest.mark.parametrize(("shape", "num_backwards"), [((2, 2), 1), ((4, 1), 3), ((1, 4), 3)])
def test_library(worlds: Worlds, shape: tuple[int, int], num_backwards: int) -> None:
    arguments = {"shape": shape, "schedules": list(SCHEDULES), "num_backwards": num_backwards}
    for errors in worlds.of(4).run(largest_errors, **arguments):
        off, part = errors[SCHEDULES.index("low_precision_reduce_scatter")]
        # A bound that nothing comes near would prove little.
        assert part > 0.05
        assert off > 1e-4


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_mixtures(worlds: Worlds, shape: tuple[int, int]) -> None:
    tables = [ModuleTable.uniform(5, replicate=shape[0], shard=shape[1])]
    schedules = [mixture(seed, tables, ("bf16", "fp16", "fp32")).text for seed in range(NUM_MIXTURES)]
    for errors in worlds.of(4).run(largest_errors, shape=shape, schedules=schedules, num_backwards=2):
        assert max(part for _, part in errors) <= 1


def test_the_factor_counts_every_rounding() -> None:
    """By hand: two ranks on each axis, fp32; bf16 on the wire of the reduce-scatter alone."""
    u, v = ROUNDOFF["float32"], ROUNDOFF["bfloat16"]
    table = ModuleTable.uniform(2)
    plain = commplan.compile("overlapped_allreduce", table)
    # Two factors, and for each axis one addition and the mean.
    assert gradient_error_factor(plain, 0) == pytest.approx((1 + u) ** 6 - 1, rel=1e-6)
    assert gradient_error_factor(plain, 0, num_backwards=3) == pytest.approx((1 + u) ** 8 - 1, rel=1e-6)
    low = commplan.compile("low_precision_reduce_scatter", table)
    # The cast, the factor in bf16, one addition and the mean; the rest in fp32.
    assert gradient_error_factor(low, 1) == pytest.approx((1 + v) ** 4 * (1 + u) ** 4 - 1, rel=1e-6)
