"""The peak of communication memory, taken apart: which buffers, on which lanes, and who makes them."""

from __future__ import annotations

from dataclasses import dataclass

from commplan.ops import COMPUTE_LANE
from commplan.plan.model import COMMUNICATION, Buffer, BufferKind, Hook, OpStep, Plan
from commplan.plan.order import lane_of


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
    """The first moment at which the most communication memory is alive. `shares` are the parts of it, largest first."""

    hook: Hook
    size_bytes: int
    shares: tuple[Share, ...]


def peak(plan: Plan) -> Peak:
    """The peak of `plan`, on one rank."""
    by_step = plan.bytes_by_step(*COMMUNICATION)
    if not by_step:
        return Peak(plan.hooks[-1], 0, ())
    step = by_step.index(max(by_step))
    steps = plan.steps
    found: dict[tuple[BufferKind, str], list[Buffer]] = {}
    for buffer in plan.buffers:
        if buffer.kind in COMMUNICATION and buffer.born <= step <= buffer.freed:
            lane = COMPUTE_LANE if buffer.kind is BufferKind.GRADIENT else lane_of(steps[buffer.born])
            found.setdefault((buffer.kind, lane), []).append(buffer)
    shares = (Share(kind, lane, tuple(buffers)) for (kind, lane), buffers in found.items())
    return Peak(plan.hook_of(step), by_step[step], tuple(sorted(shares, key=lambda share: -share.size_bytes)))


def maker(plan: Plan, buffer: Buffer) -> OpStep:
    """The op that a buffer is there for: the one that makes it, or (a gradient) that packs it."""
    step = plan.steps[buffer.freed if buffer.kind is BufferKind.GRADIENT else buffer.born]
    assert isinstance(step, OpStep)
    return step
