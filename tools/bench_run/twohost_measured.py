"""What a rank of `twohost` measures, turn by turn: backwards, and collectives alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from bench_run.emulated import SleepingLinear
from bench_run.twohost_work import slowest_s
from commplan import Plan
from commplan.fsdp2.attachment import Attachment
from commplan.ops import Kind
from commplan.plan.model import OpStep
from commplan.sight.report import BackwardReport, stats, step_of

FUSED_TOLERANCE: Final = 2.0**-20
"""Of the largest gradient: sums of four fp32 numbers in another order."""
WIRE_TOLERANCE: Final = 2.0**-6
"""Of the largest gradient: a wire dtype of 8 significant bits, rounded to at most three times."""


class Measured(Protocol):
    """Something that is measured in turn with others; only `run` is timed."""

    name: str

    def prepare(self) -> None:
        """What comes before."""

    def run(self) -> None:
        """What is timed."""

    def finish(self) -> None:
        """What comes after."""

    def restart(self) -> None:
        """Forget earlier rounds."""

    def seen(self, at: int) -> dict[str, Any]:
        """What this rank has seen, beside times, as plain data; in detail of round `at`."""


class Reference:
    """The gradients of what is measured first, stock FSDP2 if it takes part, which all others are compared with."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def difference(self, gradients: Sequence[torch.Tensor]) -> float:
        """The largest difference, of the largest gradient of the same parameter; 0 only if all bits are equal."""
        if not self.gradients:
            self.gradients = [gradient.clone() for gradient in gradients]
        return max(relative_difference(*pair) for pair in zip(gradients, self.gradients, strict=True))


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest element of `expected`; 0 only if all bits are equal, else at least the
    smallest float. Infinite where an element is not finite.
    """
    if found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
        return 0.0
    difference = ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    return max(difference, sys.float_info.min) if difference < float("inf") else float("inf")


def tolerance(plan: Plan) -> float:
    """How far from stock FSDP2 gradients may be under `plan`, of the largest one; 0 is bit-equal."""
    steps = [step for step in plan.steps if isinstance(step, OpStep)]
    if any(step.dtype not in (None, "float32") for step in steps):
        return WIRE_TOLERANCE
    reduces = [step.op for step in steps if step.kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)]
    return FUSED_TOLERANCE if any(len(op.members) > 1 or op.pieces > 1 for op in reduces) else 0.0


class Backward:
    """The backward of one model.

    Args:
        reference: what its gradients are compared with; None where they are other ones.
        attachment: what drives it, if not FSDP2 alone.
    """

    def __init__(
        self,
        name: str,
        model: nn.Sequential,
        x: torch.Tensor,
        reference: Reference | None = None,
        attachment: Attachment | None = None,
    ) -> None:
        self.name = name
        self.model: Any = model
        self._x = x
        self._reference = reference
        self._attachment = attachment
        self._difference = 0.0
        self._peak_bytes = 0
        self._loss: torch.Tensor | None = None
        self._begin_s = 0.0
        self._traces: list[dict[str, Any]] = []

    def prepare(self) -> None:
        """Forward."""
        for block in self._sleeping():
            block.slept.clear()
        self._loss = self.model(self._x).square().mean()

    def run(self) -> None:
        """Backward, which returns when this rank has its gradients."""
        assert self._loss is not None
        self._begin_s = time.perf_counter()
        self._loss.backward()

    def finish(self) -> None:
        """Compare gradients, note what ran when, and free both."""
        self._loss = None
        if self._reference is not None:
            gradients = [_local(p.grad) for p in self.model.parameters()]
            self._difference = max(self._difference, self._reference.difference(gradients))
        self._traces.append(self._trace())
        self.model.zero_grad()
        self._x.grad = None

    def seen(self, at: int) -> dict[str, Any]:
        """See `Measured`."""
        found: dict[str, Any] = {"trace": self._traces[at], "traces": self._traces}
        if self._reference is not None:
            found["difference"] = self._difference
        if self._attachment is not None:
            found |= {"tolerance": tolerance(self._attachment.plan), "peak_bytes": self._peak_bytes}
        return found

    def restart(self) -> None:
        """Forget earlier rounds."""
        self._traces.clear()
        self._difference, self._peak_bytes = 0.0, 0

    def _sleeping(self) -> list[SleepingLinear]:
        return [block for block in self.model if isinstance(block, SleepingLinear)]

    def _trace(self) -> dict[str, Any]:
        """One backward; times are milliseconds from its begin."""
        compute = [span for block in reversed(self._sleeping()) for span in block.slept]
        trace: dict[str, Any] = {"compute": [self._since_begin(*span) for span in compute]}
        if self._attachment is None:
            return trace
        report: BackwardReport | None = self._attachment.last_backward
        assert report is not None
        self._peak_bytes = max(self._peak_bytes, report.peak_bytes)
        ops = sorted(report.ops, key=lambda op: op.begin_s)
        trace["begin"], trace["end"] = self._since_begin(report.begin_s, report.end_s)
        trace["ops"] = {op.op: self._since_begin(op.issued_s or op.begin_s, op.begin_s, op.end_s) for op in ops}
        trace["waits"] = [self._since_begin(wait.begin_s, wait.end_s) for wait in report.compute_waits]
        # Those that are no step of the plan, nor its end.
        gathers = [wait for wait in report.compute_waits if wait.op and step_of(wait) is None]
        trace["gathers"] = {wait.op: self._since_begin(wait.begin_s, wait.end_s) for wait in gathers}
        trace["stats"] = stats(report)
        return trace

    def _since_begin(self, *times_s: float) -> list[float]:
        return [round((time_s - self._begin_s) * 1e3, 2) for time_s in times_s]


class Alone:
    """Something beside backwards, of which only the time counts."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self._run = run

    def prepare(self) -> None:
        """Nothing."""

    def run(self) -> None:
        """All of it."""
        self._run()

    def finish(self) -> None:
        """Nothing."""

    def restart(self) -> None:
        """Nothing."""

    def seen(self, at: int) -> dict[str, Any]:
        """See `Measured`."""
        return {}


def _local(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None, "a parameter has no gradient"
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def measure(measured: Sequence[Measured], rounds: int, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure each once a round, another one first in each round, after a round to warm up.

    Returns:
        "times_s": name -> rank -> round -> seconds; "seen": name -> rank -> what `seen` says of the median round. The same
        on every rank.
    """
    own: dict[str, list[float]] = {one.name: [] for one in measured}
    if not measured:
        return {"times_s": {}, "seen": {}}
    for turn in range(-1, rounds):
        tell({"round": turn + 1, "of": rounds})
        first = max(turn, 0) % len(measured)
        if turn == 0:
            for one in measured:
                one.restart()
        for one in (*measured[first:], *measured[:first]):
            one.prepare()
            dist.barrier()
            begin_s = time.perf_counter()
            one.run()
            taken_s = time.perf_counter() - begin_s
            one.finish()
            tell({})
            if turn >= 0:
                own[one.name].append(taken_s)
    by_rank = _gather(own)
    times_s = {name: [times[name] for times in by_rank] for name in own}
    slowest = slowest_s(times_s)
    medians = {name: found.index(median_low(found)) for name, found in slowest.items()}
    seen = _gather({one.name: one.seen(medians[one.name]) for one in measured})
    return {"times_s": times_s, "seen": {name: [of_rank[name] for of_rank in seen] for name in own}}


def _gather(local: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return gathered
