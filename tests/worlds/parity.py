"""The same steps under stock FSDP2 and under a schedule: gradients must be equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import commplan
from commplan.fsdp2 import Attachment, Options
from commplan.language import library, resolve
from commplan.ops import Kind
from commplan.plan.model import OpStep, Plan
from commplan.sight.report import BackwardReport
from tests.worlds import models
from tests.worlds.lazy import LazyLanes, PoisonedMemory
from tests.worlds.world import Rank

Schedule = tuple[str, dict[str, int]]

ROUNDING: Final[Sequence[Schedule]] = (("low_precision_reduce_scatter", {}),)
"""Those of the library that send gradients in another dtype: near to stock FSDP2's gradients, not equal."""

LIBRARY: Final[Sequence[Schedule]] = tuple((name, {}) for name in library.names() if (name, {}) not in ROUNDING)
"""The rest of the library."""

SCHEDULES: Final[Sequence[Schedule]] = (
    *LIBRARY,
    ("delayed_allreduce", {"k": 1}),
    ("delayed_allreduce", {"k": 3}),
    ("windowed_allreduce", {"k": 1}),
)
"""The same, and the edges of their params."""

HOLDING: Final = """
version: 1
name: holding
summary: Gradients are kept for k modules past their hooks, and there is never more than one reduction beside them.
params:
  k: {default: 3, min: 1, max: 8}
post_backward:
  - RS_<n-k>: {after: compute_<n-k>}
  - AR_<n-k>: {after: RS_<n-k>}
  - apply_<n-k>: {after: AR_<n-k>}
  - wait: apply_<n-k>
"""
"""A schedule under which gradients weigh most."""

DIFFERENT: Final[Sequence[Schedule]] = (
    ("blocking", {}),
    ("bucketed_pipeline_depth2", {}),
    ("delayed_allreduce", {"k": 3}),
    ("fsdp2_native", {}),
    ("chunked", {}),
    ("prefetch_overlap", {}),
)
"""Schedules that have little in common: for what hardly depends on the schedule."""

DISTINCT: Final[Sequence[Schedule]] = tuple(
    of
    for of in LIBRARY
    if of[0]
    not in (
        "deferred_allreduce",
        "overlapped_allreduce",
        "pipelined_allreduce",
        "reduce_interval",
        "shrunken_tail",
        "single_lane",
    )
)
"""The library without those that differ from another one only in where a line stands, or how far."""

LAZY: Final = Options(timeout_s=60, make_lanes=lambda device, timeout_s: LazyLanes(timeout_s), make_memory=PoisonedMemory)
EAGER: Final = Options(timeout_s=60)

Batch = torch.Tensor
Step = Sequence[dict[str, bool]]
"""One optimizer step: for each microbatch, the flags that are set before its forward."""

PLAIN: Step = [{}]
NO_SYNC: Step = [{"sync": False}, {"sync": False}, {"sync": True}]
NO_ALL_REDUCE: Step = [{"all_reduce": False}, {"all_reduce": False}, {"all_reduce": True}]
LAST_BACKWARD: Step = [{"last": False, "all_reduce": False}, {"last": True, "all_reduce": True}]


@dataclass(frozen=True)
class Problem:
    """A model, its inputs and its loss; `build` and `batch` are called alike for every variant."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[torch.Tensor, int], torch.Tensor]


def _fk_loss(out: torch.Tensor, rank: int) -> torch.Tensor:
    return (rank + 1) * out.sum()


PROBLEMS: dict[str, Problem] = {
    "FK6": Problem(lambda: models.fk(6), lambda rank, i: torch.zeros(1, requires_grad=True), _fk_loss),
    "FN": Problem(models.Net, lambda rank, i: _seeded(rank, i).requires_grad_(), lambda out, rank: out.sum()),
    "FN plain input": Problem(models.Net, lambda rank, i: _seeded(rank, i), lambda out, rank: out.sum()),
    "FN twice": Problem(
        lambda: models.Net((0, 1, 1, 2)), lambda rank, i: _seeded(rank, i).requires_grad_(), lambda out, rank: out.sum()
    ),
    "FN unused": Problem(
        lambda: models.Net((0, 2)), lambda rank, i: _seeded(rank, i).requires_grad_(), lambda out, rank: out.sum()
    ),
    "FN reversed": Problem(
        lambda: models.Net((2, 1, 0)), lambda rank, i: _seeded(rank, i).requires_grad_(), lambda out, rank: out.sum()
    ),
    "transformer": Problem(
        models.TinyTransformer,
        lambda rank, i: torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(100 * rank + i)),
        lambda out, rank: out.float().pow(2).mean(),
    ),
}

SIZES: dict[str, Problem] = {
    name: Problem(make, lambda rank, i: _seeded(rank, i).requires_grad_(), lambda out, rank: out.sum())
    for name, make in {
        "equal blocks": lambda: models.Mlps([8] * 8),
        "big root": lambda: models.Mlps([8] * 4, head=300),
        "huge module": lambda: models.Mlps([8, 8, 300, 8, 8]),
        "huge first module": lambda: models.Mlps([300, 8, 8, 8]),
        "huge last module": lambda: models.Mlps([8, 8, 8, 300]),
    }.items()
}
"""Models whose modules are of one size, or of which one is far larger than the others."""


def _seeded(rank: int, i: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + i))


def set_flags(model: Any, flags: dict[str, bool]) -> None:
    """Set FSDP2's own accumulation flags."""
    model.set_requires_gradient_sync(flags.get("sync", True))
    model.set_requires_all_reduce(flags.get("all_reduce", True))
    model.set_is_last_backward(flags.get("last", True))


def local_grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """This rank's shard of each gradient, copied."""
    return {
        name: None if p.grad is None else p.grad.to_local().clone()  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


def train(
    model: nn.Module,
    problem: Problem,
    rank: int,
    steps: Sequence[Step],
    read: Callable[[nn.Module], dict[str, torch.Tensor | None]] = local_grads,
    after: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, torch.Tensor | None]]:
    """Run the steps with SGD; the gradients of each before it is applied, as `read` finds them; `after` each backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    i = 0
    for step in steps:
        for flags in step:
            set_flags(model, flags)
            problem.loss(model(problem.batch(rank, i)), rank).backward()
            after()
            i += 1
        yield read(model)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(mine: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None], where: str) -> None:
    """Bit for bit."""
    assert mine.keys() == theirs.keys()
    for name in mine:
        one, other = mine[name], theirs[name]
        assert (one is None) == (other is None), f"{where}: {name}: {one} against {other}"
        if one is not None and other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            # What overflowed on purpose is NaN on both sides.
            assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), (
                f"{where}: {name}: off by {(one - other).abs().max()}"
            )


def is_exact(plan: Plan) -> bool:
    """Whether gradients under `plan` are those of stock FSDP2 bit for bit, collectives being gloo's.

    A narrower type on the wire rounds.  gloo sums in an order that depends on the size of what is sent, for reduce-scatters
    too, which shows where there is more than one order: from three ranks on.
    """
    for step in plan.steps:
        if not isinstance(step, OpStep) or step.kind not in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
            continue
        module = plan.modules.modules[step.op.first]
        if step.dtype not in (None, module.reduce_dtype):
            return False
        is_cut_otherwise = len(step.op.members) > 1 or step.op.pieces > 1
        if step.axis is not None and is_cut_otherwise and module.axes[step.axis] > 2:
            return False
    return True


def assert_near(mine: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None], where: str) -> None:
    """As near as sums in bf16 come to the largest gradient of the model; how near exactly is for tests of accuracy."""
    assert mine.keys() == theirs.keys()
    largest = max((float(grad.abs().max()) for grad in theirs.values() if grad is not None and grad.numel()), default=0.0)
    for name in mine:
        one, other = mine[name], theirs[name]
        assert (one is None) == (other is None), f"{where}: {name}: {one} against {other}"
        if one is not None and other is not None and other.numel():
            off = float((one - other).abs().max())
            assert off <= 2**-5 * largest, f"{where}: {name}: off by {off}, of {largest}"


def build(problem: Problem, here: Rank, shape: tuple[int, ...], sharding: dict[str, Any]) -> nn.Module:
    """The problem's model, equal on all ranks, sharded."""
    torch.manual_seed(0)
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    return models.shard(problem.build(), here.mesh(shape, names), **sharding)


def restore(model: nn.Module, values: Sequence[torch.Tensor]) -> None:
    """Set this rank's shards of the parameters."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.to_local().copy_(value)  # type: ignore[attr-defined]


def compare(
    here: Rank,
    *,
    name: str,
    shape: tuple[int, ...],
    steps: Sequence[Step],
    sharding: dict[str, Any],
    schedules: Sequence[Schedule] = (*SCHEDULES, *ROUNDING),
    lazy: bool = False,
) -> dict[str, list[tuple[int, int]]]:
    """A case: every schedule against stock FSDP2.

    Args:
        lazy: let each collective run as late as the plan allows, and destroy every buffer that is given back.

    Returns:
        schedule -> (measured, declared) peak bytes of each backward that reduced anything.
    """
    problem = (PROBLEMS | SIZES)[name]
    peaks: dict[str, list[tuple[int, int]]] = {}
    model = build(problem, here, shape, sharding)
    initial = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    # FSDP2 makes process groups for each module of each model that is resharded to an int, and never ends them.
    makes_groups = type(sharding.get("reshard")) is int
    expected = list(train(model, problem, here.rank, steps))
    assert any(g is not None for g in expected[0].values())
    for schedule, params in schedules:
        label = " ".join((resolve(schedule).name, *(f"{k}={v}" for k, v in params.items())))
        if makes_groups:
            restore(model, initial)
        else:
            model = build(problem, here, shape, sharding)
        reports: dict[int, BackwardReport] = {}
        with commplan.attach(model, schedule, options=LAZY if lazy else EAGER, **params) as attachment:

            def note(attachment: Attachment = attachment, reports: dict[int, BackwardReport] = reports) -> None:
                if (report := attachment.last_backward) is not None:
                    reports[report.number] = report

            for number, grads in enumerate(train(model, problem, here.rank, steps, after=note)):
                where = f"{name} under {label}, step {number}"
                if is_exact(attachment.plan):
                    assert_equal(grads, expected[number], where)
                elif number == 0:
                    # Later steps train other models.
                    assert_near(grads, expected[number], where)
        peaks[label] = [(report.peak_bytes, report.declared_peak_bytes) for report in reports.values()]
        assert all(measured <= declared for measured, declared in peaks[label]), label
    return peaks
