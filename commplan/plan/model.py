"""A compiled schedule: concrete steps by hook. Frozen; a `Plan` that exists is valid."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final

from commplan.errors import Span
from commplan.language.modules import ModuleTable
from commplan.ops import Axis, Kind, OpId, Section, When


@dataclass(frozen=True, slots=True)
class OpStep:
    """Run one op.

    Attributes:
        op: its name; `op.members` are the modules it covers.
        lane: the in-order queue it runs on.
        communicator: the queue of collectives it is issued to, "" for apply.  Named "shard", "replicate" or "<axis>@<lane>"
            for a lane with one of its own; ops on one communicator run in the order of the plan.
        after: every op that must be complete before it starts, as far as known at compile time: data flow and `after`.
        waits: what is left of `after` and the communicator's order when that which lanes and earlier waits already
            imply is taken away.
        dtype: torch's name of the wire type, None for the model's reduce dtype.
        span: where the schedule places it.
    """

    op: OpId
    kind: Kind
    axis: Axis | None
    lane: str
    communicator: str
    after: tuple[OpId, ...]
    waits: tuple[OpId, ...]
    dtype: str | None = None
    when: When = When.EVERY
    span: Span | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class WaitStep:
    """Compute waits until these ops are complete. `after` are all that were asked for, `waits` those not implied already."""

    after: tuple[OpId, ...]
    waits: tuple[OpId, ...]
    span: Span | None = field(default=None, compare=False)


Step = OpStep | WaitStep


@dataclass(frozen=True, slots=True)
class Hook:
    """Steps that run at one point of backward: before compute of `module`, when its gradients are complete, or in root.

    `n` is the hook's number in its section (0 for root); `module` is an index into the table (-1 for root).
    """

    section: Section
    n: int
    module: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return self.section.value if self.section is Section.ROOT else f"{self.section.value} {self.n}"


class BufferKind(StrEnum):
    """What a communication buffer holds. A PARTIAL is the reduced shard that an earlier backward left."""

    GRADIENT = "gradient"
    RS_INPUT = "rs_input"
    SHARD = "shard"
    PARTIAL = "partial_sum"
    WIRE = "wire"
    PARAMETER = "parameter"


COMMUNICATION: Final = (
    BufferKind.GRADIENT,
    BufferKind.RS_INPUT,
    BufferKind.SHARD,
    BufferKind.PARTIAL,
    BufferKind.WIRE,
)
"""What counts as communication memory; gathered parameters belong to compute."""


class Backwards(StrEnum):
    """Which backwards of an accumulated step: all alike, those before the last (from the second on, which finds what the
    first has left), or the last.
    """

    EVERY = "every"
    EARLIER = "earlier"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Communication memory of modules `first..last`: `size_bytes` on one rank, live from step `born` until after step `freed`
    of `backwards`.  Gradients are gone before the step that packs them makes a shard of them (`commplan.plan.instants`).

    Steps are numbered through the whole plan, hook after hook (`Plan.steps`).  `freed` is the compute-lane step (wait, or op
    on the compute lane) after which compute is known to be behind the last reader; `len(Plan.steps)` is the end of root.
    Partial sums are born at step 0, or last until the end of root, or both.
    """

    kind: BufferKind
    first: int
    last: int
    size_bytes: int
    born: int
    freed: int
    backwards: Backwards = Backwards.EVERY


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """A lane that the plan uses, in order of first use."""

    name: str
    priority: str = "normal"
    own_communicator: bool = False


@dataclass(frozen=True)
class Plan:
    """What the executor runs.  Hooks are in the order in which they open; the last is root.

    Attributes:
        schedule: the schedule's name.
        params: every param with the value it was compiled with.
        modules: the table it was compiled for.
        lanes: the lanes in use.
        hooks: every post-backward hook and root, and the pre-backward hooks that hold steps.
        buffers: communication memory of a backward whose flags let every op run that `when` does.
    """

    schedule: str
    params: tuple[tuple[str, int], ...]
    modules: ModuleTable
    lanes: tuple[LaneInfo, ...]
    hooks: tuple[Hook, ...]
    buffers: tuple[Buffer, ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every step, hook after hook; a step's place here is its number."""
        return tuple(step for hook in self.hooks for step in hook.steps)

    @property
    def peak_bytes(self) -> int:
        """The most communication bytes alive at once on one rank (gathered parameters are not counted)."""
        return max(self.bytes_by_step(*COMMUNICATION), default=0)

    @property
    def peak_hook(self) -> Hook:
        """The hook in which `peak_bytes` is first reached."""
        by_step = self.bytes_by_step(*COMMUNICATION)
        return self.hook_of(by_step.index(max(by_step))) if by_step else self.hooks[-1]

    @property
    def peak_backwards(self) -> Backwards:
        """The backwards in which `peak_bytes` is reached in `peak_hook`."""
        earlier, last = (self.bytes_by_step(*COMMUNICATION, backwards=one) for one in (Backwards.EARLIER, Backwards.LAST))
        by_backwards = list(zip(earlier, last, strict=True))
        before, after = max(by_backwards, key=max, default=(0, 0))
        if before == after:
            return Backwards.EVERY
        return Backwards.EARLIER if before > after else Backwards.LAST

    @property
    def partial_sum_bytes(self) -> int:
        """What stays on one rank from one backward of an accumulated step to the next, in bytes."""
        return sum(buffer.size_bytes for buffer in self.buffers if buffer.backwards is Backwards.EARLIER)

    def peak_bytes_of(self, *kinds: BufferKind) -> int:
        """The most bytes that buffers of `kinds` hold at once on one rank."""
        return max(self.bytes_by_step(*kinds), default=0)

    def bytes_by_step(self, *kinds: BufferKind, backwards: Backwards = Backwards.EVERY) -> tuple[int, ...]:
        """Bytes that buffers of `kinds` hold on one rank at each step, in the `backwards` meant; the most of all by default.

        Where a step packs gradients, that is the more of two instants: see `commplan.plan.instants`.
        """
        if backwards is Backwards.EVERY and any(buffer.backwards is not Backwards.EVERY for buffer in self.buffers):
            sides = (self.bytes_by_step(*kinds, backwards=one) for one in (Backwards.EARLIER, Backwards.LAST))
            return tuple(map(max, *sides))
        from commplan.plan.instants import bytes_by_step

        steps = self.steps
        meant = [b for b in self.buffers if b.kind in kinds and b.backwards in (Backwards.EVERY, backwards)]
        return tuple(bytes_by_step(steps, meant)[: len(steps)])

    def hook_of(self, number: int) -> Hook:
        """The hook that holds step `number`."""
        for hook in self.hooks:
            number -= len(hook.steps)
            if number < 0:
                return hook
        return self.hooks[-1]

    @property
    def num_waits(self) -> int:
        """Waits that the executor performs: those that lanes and earlier waits do not imply."""
        return sum(len(step.waits) for step in self.steps)

    @property
    def summary(self) -> str:
        """One line: modules, ops, waits, lanes and peak communication bytes."""
        from commplan.plan.text import summary

        return summary(self)

    def text(self) -> str:
        """The plan for people: one line a step, hooks as headings, a column for each lane."""
        from commplan.plan.text import text

        return text(self)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the plan: equal for equal plans, wherever the schedule was read from."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The plan as JSON, keys and order fixed; `from_json` is its inverse, places in the schedule apart."""
        from commplan.plan.serial import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan in `text`, checked as a new one is.

        Raises:
            PlanError: if `text` is not JSON of a plan, or the plan is not valid.
        """
        from commplan.plan.serial import from_json

        return from_json(text)
