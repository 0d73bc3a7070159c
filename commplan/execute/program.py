"""A plan, indexed for the executor: where each hook stands, what each step frees, which steps belong to a module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commplan.ops import Section
from commplan.plan.model import Buffer, BufferKind, Hook, OpStep, Plan, Step


@dataclass(frozen=True, slots=True)
class Program:
    """What the executor looks up while backward runs.

    Attributes:
        first_step: the number of each hook's first step.
        pre_position, post_position: hook positions by need index and by completion index.
        frees: step number -> buffers that are given back after it.
        steps_of: module -> its ops with their step numbers, in plan order.
        held: module -> bytes of gradients that its hook leaves unpacked, and the step that comes next.
    """

    plan: Plan
    hooks: Sequence[Hook]
    first_step: Sequence[int]
    pre_position: Mapping[int, int]
    post_position: Mapping[int, int]
    frees: Mapping[int, Sequence[Buffer]]
    steps_of: Mapping[int, Sequence[tuple[int, OpStep]]]
    held: Mapping[int, tuple[int, int]]
    peak_bytes: int
    digest: str

    @property
    def root(self) -> int:
        """The position of the root hook."""
        return len(self.hooks) - 1

    @property
    def end(self) -> int:
        """The number of steps."""
        return self.first_step[-1] + len(self.hooks[-1].steps)


def index_plan(plan: Plan) -> Program:
    """Index `plan`."""
    first_step: list[int] = []
    frees: dict[int, list[Buffer]] = defaultdict(list)
    steps_of: dict[int, list[tuple[int, OpStep]]] = defaultdict(list)
    numbered: list[Step] = []
    for hook in plan.hooks:
        first_step.append(len(numbered))
        numbered.extend(hook.steps)
    for number, step in enumerate(numbered):
        if isinstance(step, OpStep):
            for module in step.op.members:
                steps_of[module].append((number, step))
    for buffer in plan.buffers:
        frees[buffer.freed].append(buffer)
    positions = {
        section: {hook.n: at for at, hook in enumerate(plan.hooks) if hook.section is section}
        for section in (Section.PRE_BACKWARD, Section.POST_BACKWARD)
    }
    return Program(
        plan,
        plan.hooks,
        tuple(first_step),
        positions[Section.PRE_BACKWARD],
        positions[Section.POST_BACKWARD],
        dict(frees),
        dict(steps_of),
        {b.first: (b.size_bytes, b.born) for b in plan.buffers if b.kind is BufferKind.GRADIENT},
        plan.peak_bytes,
        plan.digest,
    )
