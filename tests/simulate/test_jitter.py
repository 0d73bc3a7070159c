"""Draws of a cost model: their distribution, and what they make of schedules, against formulas and against numpy."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from statistics import fmean

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import commplan
from commplan.language.profiles import MAX_DEVIATION
from commplan.ops import Kind
from commplan.plan.model import OpStep, Plan
from commplan.simulate import Costs, OpCost, drawn, draws, simulate

LINK = {Kind.REDUCE_SCATTER: "host", Kind.ALL_REDUCE: "network", Kind.APPLY: "", Kind.ALL_GATHER: "host"}


def costs_of(plan: Plan, compute_jitter: float, **jitter: float) -> Costs:
    """Compute and all-reduces of 10, and nothing else."""
    steps = [step for step in plan.steps if isinstance(step, OpStep)]
    ops = {s.op: OpCost(0.5, 0, 10 if s.kind is Kind.ALL_REDUCE else 0, LINK[s.kind]) for s in steps}
    ops = {op: replace(cost, issue_s=0) for op, cost in ops.items()}
    return Costs([10] * len(plan.modules), ops, compute_jitter=compute_jitter, jitter=jitter)


@pytest.mark.parametrize("deviation", [0.02, 0.2, 1.0])
def test_factors_are_log_normal_with_mean_one(deviation: float) -> None:
    plan = commplan.compile("overlapped_allreduce", 3)
    many = 2000
    factors = np.array([[s / 10 for s in one.compute_s] for one in drawn(costs_of(plan, deviation), many)])
    assert factors.mean(axis=0) == pytest.approx(1, abs=1e-12)
    assert factors.std(axis=0) == pytest.approx(deviation, rel=1e-9)
    reference = np.random.default_rng(0).lognormal(0, math.sqrt(math.log(1 + deviation**2)), 200_000)
    reference /= reference.mean()
    parts = [0.05, 0.25, 0.5, 0.75, 0.95]
    assert np.quantile(factors[:, 0], parts) == pytest.approx(np.quantile(reference, parts), rel=0.02)
    # Independent of each other.
    assert np.abs(np.corrcoef(factors.T) - np.eye(3)).max() < 0.1


@given(st.floats(0, MAX_DEVIATION), st.integers(10, 64))
@example(MAX_DEVIATION, 10)
@example(MAX_DEVIATION, 64)
def test_few_draws_differ_as_much_as_many(deviation: float, num: int) -> None:
    plan = commplan.compile("overlapped_allreduce", 2)
    factors = np.array([one.compute_s for one in drawn(costs_of(plan, deviation), num)]) / 10
    assert factors.mean(axis=0) == pytest.approx(1, abs=1e-9)
    assert factors.std(axis=0) == pytest.approx(deviation, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("num", [0, -3])
def test_no_draws_are_no_answer(num: int) -> None:
    plan = commplan.compile("blocking", 2)
    with pytest.raises(ValueError, match=f"^{num} draws were asked for: ask for one at least"):
        draws(plan, costs_of(plan, 0.1), num)


def test_what_waits_for_the_later_of_two_takes_as_long_as_clark_says() -> None:
    """Compute of the second module beside the all-reduce of the first: of two normal variables of one mean and deviation s the
    larger has mean + s / sqrt(pi) (Clark, 1961, with correlation 0).
    """
    plan = commplan.compile("overlapped_allreduce", 2)
    found = draws(plan, costs_of(plan, 0.1, network=0.1), 3000)
    assert found.mean_s == pytest.approx(30 + 1 / math.sqrt(math.pi), abs=0.03)


def test_a_chain_takes_the_sum_of_its_means() -> None:
    plan = commplan.compile("blocking", 4)
    found = draws(plan, costs_of(plan, 0.3, network=0.5), 16)
    assert found.mean_s == pytest.approx(80, rel=1e-12)
    assert sum(one.duration_s <= found.most_s for one in found.simulated) == 15
    assert max(one.duration_s for one in found.simulated) > found.most_s


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 9), st.integers(0, 3))
def test_no_schedule_gains_by_jitter(compute: float, network: float, num: int, seed: int) -> None:
    """Times are convex in what ops and modules take, so their mean is no less than the time of the means (Jensen)."""
    plan = commplan.compile("pipelined_allreduce", 4)
    costs = costs_of(plan, compute, network=network)
    assert draws(plan, costs, num, seed).mean_s >= simulate(plan, costs).duration_s * (1 - 1e-9)


def test_what_has_no_jitter_stays() -> None:
    plan = commplan.compile("prefetch_overlap", 3)
    costs = replace(costs_of(plan, 0.0, network=0.4), gather_s=[1.0] * 3, gather_link="host")
    for one in drawn(costs, 5):
        assert one.compute_s == costs.compute_s
        assert one.gather_s == costs.gather_s
        assert {cost.link for op, cost in one.ops.items() if cost != costs.ops[op]} == {"network"}
    (only,) = drawn(replace(costs, jitter={"host": 0.4}, compute_jitter=0.3), 1)
    assert (only.compute_s, only.gather_s, only.ops) == (costs.compute_s, costs.gather_s, costs.ops)
    of_host = [one.gather_s for one in drawn(replace(costs, jitter={"host": 0.4}), 5)]
    assert fmean(chain.from_iterable(of_host)) == pytest.approx(1)
    assert len(set(map(tuple, of_host))) == 5


def test_a_seed_gives_the_same_draws() -> None:
    plan = commplan.compile("eager_apply", 3)
    costs = costs_of(plan, 0.1, network=0.4)
    first, again, other = (list(drawn(costs, 4, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
