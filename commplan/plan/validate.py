"""Whether a plan is valid, from its steps alone: it may have been written or changed by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from commplan.graph.place import needs
from commplan.graph.timeline import Timeline, timeline
from commplan.language.modules import Module
from commplan.ops import COMPUTE_LANE, TRAITS, WIRE_DTYPES, Kind, OpId, Section, When
from commplan.plan.buffers import buffers
from commplan.plan.model import Hook, OpStep, Plan, Step, WaitStep
from commplan.plan.order import StepOrder, lane_of, step_order

MAX_PROBLEMS: Final = 20
PRIORITIES: Final = ("normal", "high")
GRADIENT_KINDS: Final = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.APPLY)


def problems(plan: Plan) -> tuple[str, ...]:
    """Everything that is wrong with `plan`, the first twenty of each stage; empty if it is valid.

    Each stage takes for granted what those before it have checked: hooks and lanes, then ops by themselves, then order,
    then data flow and buffers.
    """
    points = timeline(plan.modules)
    for stage in (_hooks, _lanes, _ops, _names):
        found = list(stage(plan, points))
        if found:
            return tuple(found[:MAX_PROBLEMS])
    check = _Order(plan, points, step_order(plan.hooks), plan.steps)
    found = [*check.dependencies(), *check.queues(), *check.flow(), *check.memory()]
    return tuple(found[:MAX_PROBLEMS])


def _hooks(plan: Plan, points: Timeline) -> Iterator[str]:
    """The hooks are those of the module table, in their order; only pre-backward hooks without steps may be missing."""
    rest = iter(points.points)
    for hook in plan.hooks:
        for point in rest:
            if (point.section, point.n, point.module) == (hook.section, hook.n, hook.module):
                break
            if point.section is not Section.PRE_BACKWARD:
                yield f"{hook} of module {hook.module} stands where {point.section} {point.n} of module {point.module} belongs"
                return
        else:
            yield f"{hook} of module {hook.module} is not a hook of this model, or not in its place"
            return
    if any(point.section is not Section.PRE_BACKWARD for point in rest):
        yield "the hooks end before root"


def _lanes(plan: Plan, _: Timeline) -> Iterator[str]:
    """Lanes are those in use, compute first, in order of first use."""
    used = list(dict.fromkeys([COMPUTE_LANE, *(lane_of(step) for step in plan.steps)]))
    if [lane.name for lane in plan.lanes] != used:
        yield f"lanes in use are {', '.join(used)}, not {', '.join(lane.name for lane in plan.lanes)}"
    yield from (f"lane {lane.name} has no priority {lane.priority}" for lane in plan.lanes if lane.priority not in PRIORITIES)
    if any(lane.name == COMPUTE_LANE and lane.own_communicator for lane in plan.lanes):
        yield "compute has no communicator"


def _ops(plan: Plan, points: Timeline) -> Iterator[str]:
    """Each op by itself: its kind, axis, lane, communicator, dtype, modules and hook."""
    own = {lane.name for lane in plan.lanes if lane.own_communicator}
    looks: dict[tuple[str, int], OpStep] = {}
    for hook in plan.hooks:
        here = _place(points, hook)
        for step in hook.steps:
            if isinstance(step, WaitStep):
                continue
            num_modules = len(points.need if step.kind is Kind.ALL_GATHER else points.completion)
            if step.kind is Kind.COMPUTE or step.op.family == TRAITS[Kind.COMPUTE].family:
                yield f"{step.op}: compute can't be placed"
            elif step.op.last >= num_modules:
                yield f"{step.op}: there are only {num_modules} modules"
            else:
                yield from (f"{step.op}: {fault}" for fault in _op_faults(step, own))
                yield from (f"{step.op} in {hook}: {fault}" for fault in _hook_faults(step, here, points))
                yield from (f"{step.op}: {fault}" for fault in _member_faults(step, plan, points))
                first = looks.setdefault((step.op.family, step.op.first), step)
                if _look(first) != _look(step):
                    yield f"{step.op} and {first.op} are pieces of one op, but not alike"


def _place(points: Timeline, hook: Hook) -> int:
    """The place of a hook in the timeline."""
    return {Section.PRE_BACKWARD: points.pre, Section.POST_BACKWARD: points.post}.get(hook.section, (points.root,))[hook.n]


def _look(step: OpStep) -> tuple[object, ...]:
    return step.op.last, step.op.pieces, step.kind, step.lane, step.dtype, step.when


def _op_faults(step: OpStep, own: set[str]) -> Iterator[str]:
    axis = TRAITS[step.kind].axis
    if step.axis is not axis:
        yield f"{step.kind} runs over {axis or 'no axis'}, not {step.axis or 'none'}"
    communicator = "" if axis is None else f"{axis}@{step.lane}" if step.lane in own else str(axis)
    if step.communicator != communicator:
        yield f"its communicator is {communicator!r}, not {step.communicator!r}"
    if axis is not None and step.lane == COMPUTE_LANE:
        yield "a collective never runs on compute"
    if step.dtype is not None and (step.dtype not in WIRE_DTYPES.values() or axis is None):
        yield f"it can't run in {step.dtype}"
    if step.when is not When.EVERY and step.kind not in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
        yield f"it has no `when` of its own, so it can't run in {step.when} alone"
    if axis is None and step.op.pieces > 1:
        yield "an apply has no pieces"


def _hook_faults(step: OpStep, here: int, points: Timeline) -> Iterator[str]:
    if step.kind is Kind.ALL_GATHER:
        if any(points.pre[n] < here for n in step.op.members):
            yield "the compute that needs its parameters has begun by then"
    elif any(points.post[n] > here for n in step.op.members):
        yield "gradients that it works on are not complete then"


def _member_faults(step: OpStep, plan: Plan, points: Timeline) -> Iterator[str]:
    order = points.need if step.kind is Kind.ALL_GATHER else points.completion
    modules = [plan.modules.modules[order[n]] for n in step.op.members]
    if not all(needs(module, step.kind) for module in modules):
        yield "a module of it does not need it"

    def look(module: Module) -> tuple[object, ...]:
        own = module.gather_dtype if step.kind is Kind.ALL_GATHER else (module.reduce_dtype, module.scaling)
        return own, module.axes, module.group

    if any(look(module) != look(modules[0]) for module in modules):
        yield "its modules differ in dtype or mesh"


def _names(plan: Plan, _: Timeline) -> Iterator[str]:
    """Ops are named once, their pieces in order, and waits name ops of earlier steps."""
    seen: set[OpId] = set()
    families: dict[str, Kind] = {}
    for step in plan.steps:
        if isinstance(step, OpStep):
            if families.setdefault(step.op.family, step.kind) is not step.kind:
                yield f"{step.op}: {step.op.family} is {families[step.op.family]} elsewhere"
            if step.op in seen:
                yield f"{step.op} runs twice"
            if step.op.piece and _piece(step.op, step.op.piece - 1) not in seen:
                yield f"{step.op} is issued before the piece ahead of it"
        name = str(step.op) if isinstance(step, OpStep) else "a wait"
        yield from (f"{name} waits for {op}, which is not issued before it" for op in step.waits if op not in seen)
        if isinstance(step, OpStep):
            seen.add(step.op)
    for op in seen:
        if op.piece == 0 and _piece(op, op.pieces - 1) not in seen:
            yield f"{op}: pieces of it are missing"


def _piece(op: OpId, piece: int) -> OpId:
    return OpId(op.family, op.first, op.last, piece, op.pieces)


@dataclass(frozen=True)
class _Order:
    """Checks that need to know what is over when."""

    plan: Plan
    points: Timeline
    order: StepOrder
    steps: tuple[Step, ...]

    def dependencies(self) -> Iterator[str]:
        """Waits, lanes and hooks bring about all of `after`."""
        number = 0
        for hook in self.plan.hooks:
            for step in hook.steps:
                name = str(step.op) if isinstance(step, OpStep) else f"a wait in {hook}"
                for op in step.after:
                    if not self.is_over(op, number, hook):
                        yield f"{name} may start before {op} is complete, which it names in `after`"
                number += 1

    def is_over(self, op: OpId, number: int, hook: Hook) -> bool:
        """Whether `op` is complete when step `number`, in `hook`, starts."""
        if op.family == TRAITS[Kind.COMPUTE].family:
            known = op.last < len(self.points.post) and op.pieces == 1
            return known and self.points.post[op.last] <= _place(self.points, hook)
        first = self.order.step_of.get(op)
        return first is not None and first < number and self.order.before(first, number)

    def queues(self) -> Iterator[str]:
        """On each communicator one op runs at a time."""
        by_communicator: dict[str, list[int]] = {}
        for number, step in enumerate(self.steps):
            if isinstance(step, OpStep) and step.communicator:
                by_communicator.setdefault(step.communicator, []).append(number)
        for communicator, numbers in by_communicator.items():
            for one, other in pairwise(numbers):
                if not self.order.before(one, other):
                    yield f"{self.op(other)} may start on communicator {communicator} before {self.op(one)} is complete"

    def op(self, number: int) -> OpId:
        """The op of a step."""
        step = self.steps[number]
        assert isinstance(step, OpStep)
        return step.op

    def flow(self) -> Iterator[str]:
        """Each module is gathered, reduced over each of its axes and applied, once, each after what it reads."""
        by_kind: dict[tuple[Kind, int], list[int]] = {}
        done: Counter[tuple[Kind, int, int]] = Counter()
        for number, step in enumerate(self.steps):
            if isinstance(step, OpStep):
                for n in step.op.members:
                    by_kind.setdefault((step.kind, n), []).append(number)
                    done[step.kind, n, step.op.piece] += 1
        for (kind, n, _), times in done.items():
            if times > 1:
                yield f"{TRAITS[kind].family} of module {n} runs {times} times"
        yield from self.parameters(by_kind)
        for n, place in enumerate(self.points.completion):
            module = self.plan.modules.modules[place]
            before: list[int] = []
            for kind in GRADIENT_KINDS:
                if not needs(module, kind):
                    continue
                found = by_kind.get((kind, n))
                if found is None:
                    yield f"module {n} ({module.name}) has no {kind}"
                    break
                yield from self.reads(before, found)
                before = found

    def reads(self, writers: list[int], readers: list[int]) -> Iterator[str]:
        """Each piece comes after the same piece of what it reads, or after all of it."""
        if not writers:
            return
        same = len(writers) == len(readers)
        for place, reader in enumerate(readers):
            writer = writers[place] if same else writers[-1]
            if writer > reader or not self.order.before(writer, reader):
                yield f"{self.op(reader)} may start before {self.op(writer)} is complete, and reads what that writes"
        one, other = (self.steps[numbers[0]] for numbers in (writers, readers))
        assert isinstance(one, OpStep)
        assert isinstance(other, OpStep)
        if one.when is not other.when and other.when is When.EVERY and other.kind is Kind.ALL_REDUCE:
            yield f"{other.op} runs in backwards in which {one.op} does not"

    def parameters(self, by_kind: dict[tuple[Kind, int], list[int]]) -> Iterator[str]:
        """If the plan gathers, it gathers all that needs to be, and compute waits for it."""
        if not any(kind is Kind.ALL_GATHER for kind, _ in by_kind):
            return
        places = [_place(self.points, hook) for hook in self.plan.hooks]
        following = 0
        for n, index in enumerate(self.points.need):
            while places[following] <= self.points.pre[n]:
                following += 1
            module = self.plan.modules.modules[index]
            found = by_kind.get((Kind.ALL_GATHER, n))
            if not needs(module, Kind.ALL_GATHER):
                continue
            if found is None:
                yield f"module {n} in need order ({module.name}) has no all_gather"
                continue
            begun = self.order.opening[following]
            if not all(self.order.clocks.before(self.order.node[number], begun) for number in found):
                yield f"the backward of {module.name} may start before {self.op(found[-1])} is complete"

    def memory(self) -> Iterator[str]:
        """Buffers are those that follow from the steps."""
        right = buffers(self.plan.hooks, self.plan.modules, self.order)
        for given, wanted in zip(self.plan.buffers, right, strict=False):
            if given != wanted:
                yield f"buffer {given} should be {wanted}"
                return
        if len(self.plan.buffers) != len(right):
            yield f"it needs {len(right)} buffers, not {len(self.plan.buffers)}"
