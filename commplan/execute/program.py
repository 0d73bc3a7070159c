"""A plan, indexed for the executor: where each hook stands, what each step frees, which steps belong to a module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commplan.graph.timeline import orders
from commplan.language.modules import Module
from commplan.ops import ITEMSIZE_BYTES, Kind, OpId, Section, When
from commplan.plan.model import Buffer, BufferKind, Hook, OpStep, Plan, Step


@dataclass(frozen=True, slots=True)
class Action:
    """One step, with what is looked up when it runs.

    Attributes:
        text: the step's number in the plan.
        members: the modules of its op; of an all-gather need indices.
        makes_copy: the plan counts the copy that it makes for the wire.
        frees: buffers that are given back after it.
    """

    text: str
    step: Step
    members: Sequence[int]
    makes_copy: bool
    frees: Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class Program:
    """What the executor looks up while backward runs.

    Attributes:
        need: need index -> index into the table of modules.
        first_step: the number of each hook's first step.
        pre_position, post_position: hook positions by need index and by completion index.
        actions: by the position of their hook.
        copies: step number -> the step, where one makes a copy for the wire; of a chunked reduce-scatter the first.
        modules: those with something to reduce, in completion order.
        shard_of: module -> the op that makes its shard.
        steps_of: module -> its reductions and its apply with their step numbers, in plan order; of a chunked op the first.
        held: module -> bytes of gradients that its hook leaves unpacked, and the step that comes next.
        kept_whole: modules that are not reduced at all in a backward that is not the last of its step.
        kept_partial: modules that are not all-reduced in such a one.
        sends_fp16: modules of which something travels in fp16, whatever they are reduced in.
    """

    plan: Plan
    hooks: Sequence[Hook]
    need: Sequence[int]
    first_step: Sequence[int]
    pre_position: Mapping[int, int]
    post_position: Mapping[int, int]
    actions: Sequence[Sequence[Action]]
    copies: Mapping[int, OpStep]
    modules: Sequence[Module]
    shard_of: Mapping[int, OpId]
    steps_of: Mapping[int, Sequence[tuple[int, OpStep]]]
    held: Mapping[int, tuple[int, int]]
    kept_whole: frozenset[int]
    kept_partial: frozenset[int]
    sends_fp16: frozenset[int]
    gathers: bool
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

    def itemsize_bytes(self, step: OpStep) -> int:
        """Bytes of an element that a reduction sends."""
        return ITEMSIZE_BYTES[step.dtype or self.modules[step.op.first].reduce_dtype]

    @property
    def accumulates(self) -> bool:
        """Whether backwards of a step differ."""
        return bool(self.kept_whole or self.kept_partial)


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
        if isinstance(step, OpStep) and step.kind is not Kind.ALL_GATHER and step.op.piece == 0:
            for module in step.op.members:
                steps_of[module].append((number, step))
    for buffer in plan.buffers:
        frees[buffer.freed].append(buffer)
    positions = {
        section: {hook.n: at for at, hook in enumerate(plan.hooks) if hook.section is section}
        for section in (Section.PRE_BACKWARD, Section.POST_BACKWARD)
    }
    wires = [buffer.born for buffer in plan.buffers if buffer.kind is BufferKind.WIRE]
    copies = {number: step for number in wires if isinstance(step := numbered[number], OpStep)}
    skipped = {module: [s for _, s in steps if s.when is When.LAST_BACKWARD] for module, steps in steps_of.items()}
    completion, need = orders(plan.modules)
    return Program(
        plan,
        plan.hooks,
        need,
        tuple(first_step),
        positions[Section.PRE_BACKWARD],
        positions[Section.POST_BACKWARD],
        [
            [
                Action(
                    str(number),
                    step,
                    tuple(step.op.members) if isinstance(step, OpStep) else (),
                    number in copies,
                    tuple(frees.get(number, ())),
                )
                for number, step in enumerate(hook.steps, first)
            ]
            for first, hook in zip(first_step, plan.hooks, strict=True)
        ],
        copies,
        [plan.modules.modules[index] for index in completion],
        {module: steps[0][1].op for module, steps in steps_of.items()},
        dict(steps_of),
        {b.first: (b.size_bytes, b.born) for b in plan.buffers if b.kind is BufferKind.GRADIENT},
        frozenset(module for module, steps in steps_of.items() if steps[0][1] in skipped[module]),
        frozenset(module for module, steps in skipped.items() if any(s.kind is Kind.ALL_REDUCE for s in steps)),
        frozenset(module for module, steps in steps_of.items() if any(s.dtype == "float16" for _, s in steps)),
        any(isinstance(step, OpStep) and step.kind is Kind.ALL_GATHER for step in numbered),
        plan.peak_bytes,
        plan.digest,
    )
