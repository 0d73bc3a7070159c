"""How far rounding can take the gradients of a plan from their exact mean.

Each operation of a reduction rounds to nearest: fl(x) = x (1 + d) with |d| <= u, the unit roundoff of its dtype (the standard
model: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM 2002, eq. 2.4).  A sum of p numbers passes each of
them through at most p - 1 additions, in whatever order a collective adds (section 4.2).  So every summand of a gradient comes
with at most k factors (1 + d), and an element is off by at most ((1 + u)^k - 1) times the mean of the summands' magnitudes.
Overflow and underflow are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from commplan.graph.timeline import orders
from commplan.language.modules import Module
from commplan.ops import Axis, Kind
from commplan.plan.model import OpStep, Plan

ROUNDOFF: Final = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff: half the distance from 1 to the next number; 2^-t for t digits, the hidden one counted (IEEE 754)."""

_MEAN: Final = 1
"""A mean is a sum and a division, or a division before it."""


def gradient_error_factor(plan: Plan, n: int, *, num_backwards: int = 1) -> float:
    """A bound on |computed - exact| / S for each element of the gradient of the module that completes `n`-th.

    Exact is the sum over microbatches of the mean over ranks of the gradients that autograd leaves on each rank, S the same of
    their magnitudes.  FSDP2 itself rounds as well: the bound is never 0.

    Args:
        num_backwards: microbatches of the step.

    Raises:
        KeyError: a dtype of the module is none of `ROUNDOFF`.
    """
    module = plan.modules.modules[orders(plan.modules)[0][n]]
    roundings = _roundings(plan, n, module, num_backwards)
    return math.expm1(sum(count * math.log1p(ROUNDOFF[dtype]) for dtype, count in roundings))


def _roundings(plan: Plan, n: int, module: Module, num_backwards: int) -> Iterator[tuple[str, int]]:
    """(dtype, how often a summand is rounded to it)."""
    own = module.reduce_dtype
    steps = (step for step in plan.steps if isinstance(step, OpStep) and step.op.piece == 0)
    reductions = {step.kind: step for step in steps if step.kind is not Kind.ALL_GATHER and n in step.op.members}
    held = module.gather_dtype
    # Microbatches are added whole, reduced, or in `.grad`, whatever the flags say: in the narrowest of these.
    grad = module.trainable[0].dtype
    yield max(own, grad, key=ROUNDOFF.__getitem__), num_backwards - 1
    # The factor before the reduction, and the one after it.
    yield own, 2
    for kind, axis in ((Kind.REDUCE_SCATTER, Axis.SHARD), (Kind.ALL_REDUCE, Axis.REPLICATE)):
        if kind in reductions:
            wire = reductions[kind].dtype or own
            yield wire, _narrows(held, wire) + module.axes[axis] - 1 + _MEAN + (wire != own)
            held = wire
        if _narrows(held, own):
            yield own, 1
        held = own
    yield grad, _narrows(own, grad)


def _narrows(held: str, dtype: str) -> int:
    """1 if a number of `held` may change when it becomes one of `dtype`, else 0."""
    wider = {("bfloat16", "float32"), ("float16", "float32")}
    return int(held != dtype and (held, dtype) not in wider and dtype != "float64")
