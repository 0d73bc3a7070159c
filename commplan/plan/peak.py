"""The peak of communication memory, taken apart: which buffers, on which lanes, and who makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from commplan.ops import COMPUTE_LANE, Kind
from commplan.plan.instants import alive
from commplan.plan.model import COMMUNICATION, Backwards, Buffer, BufferKind, Hook, OpStep, Plan, Step

GRADIENT_KINDS: Final = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.APPLY)


@dataclass(frozen=True, slots=True)
class Share:
    """The buffers of one kind, made on one lane, that are alive at the peak."""

    kind: BufferKind
    lane: str
    buffers: tuple[Buffer, ...]

    @property
    def size_bytes(self) -> int:
        """Of all buffers together."""
        return sum(buffer.size_bytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which the most communication memory is alive, and the backwards in which it is. `shares` are the
    parts of it, largest first.
    """

    hook: Hook
    backwards: Backwards
    size_bytes: int
    shares: tuple[Share, ...]


def peak(plan: Plan) -> Peak:
    """The peak of `plan`, on one rank."""
    by_step = plan.bytes_by_step(*COMMUNICATION)
    backwards = plan.peak_backwards
    if not by_step:
        return Peak(plan.hooks[-1], backwards, 0, ())
    step = by_step.index(max(by_step))
    one = Backwards.LAST if backwards is Backwards.EVERY else backwards
    makers = Makers.of(plan)
    found: dict[tuple[BufferKind, str], list[Buffer]] = {}
    meant = (b for b in plan.buffers if b.kind in COMMUNICATION and b.backwards in (Backwards.EVERY, one))
    for buffer in alive(makers.steps, meant, step):
        lane = COMPUTE_LANE if buffer.kind is BufferKind.GRADIENT else makers.writer(buffer).lane
        found.setdefault((buffer.kind, lane), []).append(buffer)
    shares = (Share(kind, lane, tuple(buffers)) for (kind, lane), buffers in found.items())
    return Peak(plan.hook_of(step), backwards, by_step[step], tuple(sorted(shares, key=lambda share: -share.size_bytes)))


def is_partial_sum(buffer: Buffer) -> bool:
    """Whether a buffer is there, as long as it is, because an op is skipped in all backwards but the last."""
    whole = buffer.kind is BufferKind.GRADIENT and buffer.backwards is Backwards.LAST
    return buffer.kind is BufferKind.PARTIAL or buffer.backwards is Backwards.EARLIER or whole


@dataclass(frozen=True, slots=True)
class Makers:
    """The ops of a plan, by number and by kind and module (the last piece of each)."""

    steps: tuple[Step, ...]
    by_module: Mapping[tuple[Kind, int], OpStep]

    @classmethod
    def of(cls, plan: Plan) -> Makers:
        """Those of `plan`."""
        steps = plan.steps
        ops = (step for step in steps if isinstance(step, OpStep))
        return cls(steps, {(step.kind, n): step for step in ops for n in step.op.members})

    def writer(self, buffer: Buffer) -> OpStep:
        """The op that makes a buffer; for a gradient, the one that packs it."""
        if buffer.kind is BufferKind.GRADIENT:
            return self.first(buffer, GRADIENT_KINDS)
        if buffer.kind is BufferKind.PARTIAL:
            return self.first(buffer, (Kind.REDUCE_SCATTER,))
        step = self.steps[buffer.born]
        assert isinstance(step, OpStep)
        return step

    def cause(self, buffer: Buffer) -> OpStep:
        """The op that a buffer is there for: what makes it, or for a partial sum the op that is skipped."""
        if is_partial_sum(buffer) and buffer.kind is not BufferKind.GRADIENT:
            return self.first(buffer, (Kind.ALL_REDUCE,))
        return self.writer(buffer)

    def first(self, buffer: Buffer, kinds: Sequence[Kind]) -> OpStep:
        """The op of the first of `kinds` that the modules of a buffer have."""
        return next(self.by_module[kind, buffer.last] for kind in kinds if (kind, buffer.last) in self.by_module)
