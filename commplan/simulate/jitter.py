"""What differs from one time to the next: a cost model drawn some times, and what becomes of a plan under each.

A schedule that waits for something at every module is held up by whatever is late, and nothing that is early makes up for it:
it takes longer than its cost model says, whose figures are means.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist, fmean, pstdev
from typing import Final

from commplan.plan.model import Plan
from commplan.simulate.costs import Costs, OpCost
from commplan.simulate.engine import Simulated, simulate

MANY: Final = 0.9
"""The part of draws that `Draws.most_s` is not exceeded by."""

_HALVINGS: Final = 50


@dataclass(frozen=True)
class Draws:
    """The same plan under each of some draws of its costs."""

    plan: Plan
    simulated: Sequence[Simulated]

    @property
    def mean_s(self) -> float:
        """Seconds of a backward."""
        return fmean(one.duration_s for one in self.simulated)

    @property
    def most_s(self) -> float:
        """Seconds within which nine backwards of ten are over."""
        took_s = sorted(one.duration_s for one in self.simulated)
        return took_s[math.ceil(MANY * len(took_s)) - 1]


def draws(plan: Plan, costs: Costs, num: int, seed: int = 0) -> Draws:
    """Simulate `plan` under `num` draws of `costs`, at least one.

    Raises:
        DeadlockError: as `simulate` does.
        ValueError: `num` is less than one.
    """
    if num < 1:
        raise ValueError(f"{num} draws were asked for: ask for one at least")
    return Draws(plan, [simulate(plan, one) for one in drawn(costs, num, seed)])


def drawn(costs: Costs, num: int, seed: int = 0) -> Iterator[Costs]:
    """`num` times the same costs, each module and each op taking its part more or less, independently of the others.

    Factors have mean 1 over the draws, and the deviation that is asked for.  They are the middles of `num` parts of equal
    probability of a log-normal distribution, in another order for each module and op: lattice sampling (Patterson, 1954), the
    Latin hypercube of McKay, Beckman and Conover (1979) without chance inside the parts.  So far fewer draws will do than of
    independent ones.
    """
    order = random.Random(seed)
    compute = [_factors(costs.compute_jitter, num, order) for _ in costs.compute_s]
    gathering = [_factors(costs.jitter.get(costs.gather_link, 0), num, order) for _ in costs.gather_s]
    ops = {op: _factors(costs.jitter.get(cost.link, 0), num, order) for op, cost in costs.ops.items()}
    for draw in range(num):
        yield replace(
            costs,
            compute_s=[seconds * of[draw] for seconds, of in zip(costs.compute_s, compute, strict=True)],
            gather_s=[seconds * of[draw] for seconds, of in zip(costs.gather_s, gathering, strict=True)],
            ops={op: _longer(cost, ops[op][draw]) for op, cost in costs.ops.items()},
        )


def _longer(cost: OpCost, factor: float) -> OpCost:
    """What the compute lane does to issue an op is not what varies."""
    return replace(cost, latency_s=cost.latency_s * factor, transfer_s=cost.transfer_s * factor)


def _factors(deviation: float, num: int, order: random.Random) -> list[float]:
    """`num` factors of mean 1 and this standard deviation, in a random order."""
    factors = list(_middles(deviation, num))
    order.shuffle(factors)
    return factors


@lru_cache(maxsize=64)
def _middles(deviation: float, num: int) -> tuple[float, ...]:
    """The middles of `num` parts, in order. So few of a wide distribution that they can't differ as much differ as they can."""
    if deviation == 0 or num == 1:
        return (1.0,) * num
    # The variance of a log-normal variable is (exp(sigma^2) - 1) times the square of its mean; middles of parts differ less.
    low, high = 0.0, 2 * math.sqrt(math.log1p(deviation**2)) + 1
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if pstdev(_log_normal(middle, num)) < deviation:
            low = middle
        else:
            high = middle
    return _log_normal(high, num)


def _log_normal(sigma: float, num: int) -> tuple[float, ...]:
    factors = [math.exp(sigma * NormalDist().inv_cdf((part + 0.5) / num)) for part in range(num)]
    mean = fmean(factors)
    return tuple(factor / mean for factor in factors)
