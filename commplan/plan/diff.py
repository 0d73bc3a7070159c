"""What differs between two plans: steps, hook by hook, with what they wait for; lanes; communication memory.

An op is the same one where it has the same name, a wait where it stands in the same hook and was asked to wait for the same
ops.  Names of schedules and values of params are not compared: plans that run alike are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from commplan.ops import OpId, Section
from commplan.plan.model import COMMUNICATION, Hook, LaneInfo, OpStep, Plan, Step, WaitStep

HookKey = tuple[Section, int]
_StepKey = OpId | tuple[tuple[OpId, ...], int]


class ChangeKind(StrEnum):
    """What became of a step."""

    ADDED = "added"
    REMOVED = "removed"
    MOVED = "moved"
    REORDERED = "reordered"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One thing about a step or a lane that differs: its name, and both values as text, ops as their names."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepChange:
    """A step that differs, told in the hook that it is in after (a removed one: before).

    Attributes:
        before, after: the step in each plan; None where it is not there.
        source: the hook it came from, of a moved one.
        fields: what differs about the step itself.  Of a reordered one `follows` names the step ahead of it.
    """

    kind: ChangeKind
    before: Step | None
    after: Step | None
    source: Hook | None = None
    fields: tuple[FieldChange, ...] = ()

    @property
    def step(self) -> Step:
        """The step after, or else before."""
        found = self.after if self.after is not None else self.before
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class HookDiff:
    """One hook: its steps that differ, and the most communication bytes alive on one rank during its steps (None: no steps)."""

    hook: Hook
    before_bytes: int | None
    after_bytes: int | None
    changes: tuple[StepChange, ...]


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """All that differs between `before` and `after`.  `hooks` has every hook of either plan, unchanged ones too."""

    before: Plan
    after: Plan
    lanes: tuple[tuple[str, LaneInfo | None, LaneInfo | None], ...]
    hooks: tuple[HookDiff, ...]

    @property
    def same_modules(self) -> bool:
        """Whether both plans are for the same module table."""
        return self.before.modules == self.after.modules

    @property
    def equal(self) -> bool:
        """Whether both plans run the same ops in the same way, for the same modules."""
        return self.same_modules and not self.lanes and not any(hook.changes for hook in self.hooks)

    def count(self, kind: ChangeKind) -> int:
        """How many steps became this."""
        return sum(change.kind is kind for hook in self.hooks for change in hook.changes)


def diff(before: Plan, after: Plan) -> PlanDiff:
    """What differs between two plans."""
    sides = _Side.of(before), _Side.of(after)
    hooks = tuple(_hook_diff(key, *sides) for key in _merged(list(sides[0].hooks), list(sides[1].hooks)))
    return PlanDiff(before, after, tuple(_lanes(before, after)), hooks)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the plans, by hook: its steps by key, and bytes; and where each op is."""

    hooks: Mapping[HookKey, Hook]
    steps: Mapping[HookKey, Mapping[_StepKey, Step]]
    bytes: Mapping[HookKey, int | None]
    place: Mapping[OpId, HookKey]

    @classmethod
    def of(cls, plan: Plan) -> _Side:
        by_step = plan.bytes_by_step(*COMMUNICATION)
        hooks = {(hook.section, hook.n): hook for hook in plan.hooks}
        steps = {key: _keyed(hook.steps) for key, hook in hooks.items()}
        place = {step.op: key for key, hook in hooks.items() for step in hook.steps if isinstance(step, OpStep)}
        peaks: dict[HookKey, int | None] = {}
        number = 0
        for key, hook in hooks.items():
            peaks[key] = max(by_step[number : number + len(hook.steps)], default=None)
            number += len(hook.steps)
        return cls(hooks, steps, peaks, place)

    def find(self, name: _StepKey) -> tuple[Step, Hook] | None:
        """An op and its hook; None for a wait, and for an op that is not there."""
        if not isinstance(name, OpId) or name not in self.place:
            return None
        key = self.place[name]
        return self.steps[key][name], self.hooks[key]


def _keyed(steps: Sequence[Step]) -> dict[_StepKey, Step]:
    """Steps by what makes them the same one: an op by its name, a wait by what it was asked to wait for, and its repetition."""
    keyed: dict[_StepKey, Step] = {}
    repetitions: Counter[tuple[OpId, ...]] = Counter()
    for step in steps:
        if isinstance(step, OpStep):
            keyed[step.op] = step
        else:
            keyed[step.after, repetitions[step.after]] = step
            repetitions[step.after] += 1
    return keyed


def _merged(one: list[HookKey], other: list[HookKey]) -> Iterator[HookKey]:
    """The hooks of both plans, each once; what only one of them has stands ahead of the next that both have."""
    common = set(one) & set(other)
    done: set[HookKey] = set()
    rest = iter(other)
    for key in one:
        if key in common and key not in done:
            for ahead in rest:
                if ahead not in done:
                    done.add(ahead)
                    yield ahead
                if ahead == key:
                    break
        if key not in done:
            done.add(key)
            yield key
    yield from (key for key in rest if key not in done)


def _hook_diff(key: HookKey, before: _Side, after: _Side) -> HookDiff:
    hook = after.hooks[key] if key in after.hooks else before.hooks[key]
    old, new = before.steps.get(key, {}), after.steps.get(key, {})
    removed = [
        StepChange(ChangeKind.REMOVED, step, None)
        for name, step in old.items()
        if name not in new and not (isinstance(name, OpId) and name in after.place)
    ]
    changes = _changes(old, new, before)
    return HookDiff(hook, before.bytes.get(key), after.bytes.get(key), (*removed, *changes))


def _changes(old: Mapping[_StepKey, Step], new: Mapping[_StepKey, Step], before: _Side) -> Iterator[StepChange]:
    """What is new or other about the steps of a hook, in their new order."""
    kept = _in_order(old, new)
    ahead = _ahead(old), _ahead(new)
    for name, step in new.items():
        was, source = old.get(name), None
        if was is None and (found := before.find(name)) is not None:
            was, source = found
        fields = () if was is None else tuple(_fields(was, step))
        if was is None:
            yield StepChange(ChangeKind.ADDED, None, step)
        elif source is not None:
            yield StepChange(ChangeKind.MOVED, was, step, source, fields)
        elif name not in kept:
            follows = FieldChange("follows", *(names[name] for names in ahead))
            yield StepChange(ChangeKind.REORDERED, was, step, None, (follows, *fields))
        elif fields:
            yield StepChange(ChangeKind.CHANGED, was, step, None, fields)


def _in_order(old: Mapping[_StepKey, Step], new: Mapping[_StepKey, Step]) -> set[_StepKey]:
    """As many steps of both as can be taken to have kept their order: a longest increasing run of old places."""
    place = {name: number for number, name in enumerate(old)}
    ends: list[int] = []
    last: list[_StepKey] = []
    previous: dict[_StepKey, _StepKey | None] = {}
    for name in new:
        if name not in place:
            continue
        length = bisect_left(ends, place[name])
        ends[length : length + 1] = [place[name]]
        last[length : length + 1] = [name]
        previous[name] = last[length - 1] if length else None
    kept: set[_StepKey] = set()
    at = last[-1] if last else None
    while at is not None:
        kept.add(at)
        at = previous[at]
    return kept


def _ahead(steps: Mapping[_StepKey, Step]) -> dict[_StepKey, tuple[str, ...]]:
    """What stands ahead of each step: an op, a wait with its ops, or nothing."""
    ahead: dict[_StepKey, tuple[str, ...]] = {}
    last: tuple[str, ...] = ()
    for name, step in steps.items():
        ahead[name] = last
        last = (str(step.op),) if isinstance(step, OpStep) else ("wait", *map(str, step.after))
    return ahead


def _fields(before: Step, after: Step) -> Iterator[FieldChange]:
    """What differs about a step that both plans have."""
    for (name, one), (_, other) in zip(_look(before), _look(after), strict=True):
        if one != other:
            yield FieldChange(name, one, other)


def _look(step: Step) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Everything about a step but its name and place, as text."""
    order = (("waits", tuple(map(str, step.waits))), ("after", tuple(map(str, step.after))))
    if isinstance(step, WaitStep):
        return order
    values = {
        "lane": step.lane,
        "communicator": step.communicator,
        "kind": step.kind,
        "axis": step.axis,
        "dtype": step.dtype,
        "when": step.when,
    }
    return (*order, *((name, (str(value),) if value else ()) for name, value in values.items()))


def _lanes(before: Plan, after: Plan) -> Iterator[tuple[str, LaneInfo | None, LaneInfo | None]]:
    """Lanes that one plan alone uses, or that are not as they were."""
    one, other = ({lane.name: lane for lane in plan.lanes} for plan in (before, after))
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            yield name, one.get(name), other.get(name)
