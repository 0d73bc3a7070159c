"""The difference of two plans for a person (text, with colours on a terminal) and for a program (JSON).

What repeats is told once: hooks with the same changes, counted from their own n, and steps of one hook that differ alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from commplan.cli.render import visible
from commplan.ops import OpId, Section
from commplan.plan import Hook, LaneInfo, OpStep, Plan
from commplan.plan.diff import ChangeKind, FieldChange, HookDiff, PlanDiff, StepChange
from commplan.plan.text import moment, size

REPORT_VERSION: Final = 1
MIN_RUN: Final = 3
"""So many alike are told as one."""

_SIGNS: Final = {
    ChangeKind.ADDED: ("+", "green"),
    ChangeKind.REMOVED: ("-", "red"),
    ChangeKind.MOVED: (">", "cyan"),
    ChangeKind.REORDERED: ("^", "cyan"),
    ChangeKind.CHANGED: ("~", "yellow"),
}
_LEGEND: Final = "+ added   - removed   > moved here   ^ other order   ~ changed"
_OPS: Final = ("waits", "after", "follows")
"""Fields that hold names of ops."""

Namer = Callable[[str], str]


def difference_text(found: PlanDiff) -> Text:
    """What differs, hook by hook, and a summary."""
    before, after = found.before, found.after
    out = Text.assemble((f"{_title(before)} -> {_title(after)}", "bold"), f", {_modules(found)}\n")
    if any(hook.changes for hook in found.hooks):
        out.append(f"{_LEGEND}\n", "dim")
    lanes = [_lane(*lane) for lane in found.lanes]
    if lanes:
        out.append("\nlanes\n", "bold")
        for sign, style, text in lanes:
            out.append(f"  {sign} ", style).append(f"{visible(text)}\n")
    for group in _groups(found.hooks):
        out.append("\n").append_text(_group_text(group))
    return out.append("\n").append_text(_summary(found))


def difference_json(found: PlanDiff) -> dict[str, Any]:
    """The same as plain data: hooks that differ in steps or bytes.  New keys may be added; other changes raise `version`."""
    return {
        "version": REPORT_VERSION,
        "equal": found.equal,
        "before": _plan_json(found.before),
        "after": _plan_json(found.after),
        "same_modules": found.same_modules,
        "lanes": [{"lane": name, "before": _lane_json(one), "after": _lane_json(other)} for name, one, other in found.lanes],
        "hooks": [
            {
                "hook": str(hook.hook),
                "peak_bytes": {"before": hook.before_bytes, "after": hook.after_bytes},
                "changes": [_change_json(change) for change in hook.changes],
            }
            for hook in found.hooks
            if _differs(hook)
        ],
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "schedule": plan.schedule,
        "params": dict(plan.params),
        "num_modules": len(plan.modules),
        "digest": plan.digest,
        "num_waits": plan.num_waits,
        "peak_bytes": plan.peak_bytes,
        "peak_hook": str(plan.peak_hook),
        "peak_backwards": plan.peak_backwards.value,
        "partial_sum_bytes": plan.partial_sum_bytes,
    }


def _lane_json(lane: LaneInfo | None) -> dict[str, Any] | None:
    return None if lane is None else {"priority": lane.priority, "own_communicator": lane.own_communicator}


def _change_json(change: StepChange) -> dict[str, Any]:
    step = change.step
    return {
        "change": change.kind.value,
        "op": str(step.op) if isinstance(step, OpStep) else None,
        "wait": None if isinstance(step, OpStep) else [str(op) for op in step.after],
        "lane": step.lane if isinstance(step, OpStep) else None,
        "from": str(change.source) if change.source is not None else None,
        "fields": {field.name: {"before": list(field.before), "after": list(field.after)} for field in change.fields},
    }


def _differs(hook: HookDiff) -> bool:
    return bool(hook.changes) or hook.before_bytes != hook.after_bytes


# The text


def _title(plan: Plan) -> str:
    return visible(" ".join([plan.schedule, *(f"{name}={value}" for name, value in plan.params)]))


def _modules(found: PlanDiff) -> str:
    one, other = len(found.before.modules), len(found.after.modules)
    if found.same_modules:
        return "1 module" if one == 1 else f"{one} modules"
    return f"{one} -> {other} modules" if one != other else f"{one} modules, not the same ones"


def _lane(name: str, before: LaneInfo | None, after: LaneInfo | None) -> tuple[str, str, str]:
    def look(lane: LaneInfo) -> str:
        return f"priority {lane.priority}" + (", a communicator of its own" if lane.own_communicator else "")

    if before is None or after is None:
        lane = after or before
        assert lane is not None
        return *_SIGNS[ChangeKind.ADDED if before is None else ChangeKind.REMOVED], f"{name}: {look(lane)}"
    return *_SIGNS[ChangeKind.CHANGED], f"{name}: {look(before)} -> {look(after)}"


@dataclass(slots=True)
class _Group:
    """Hooks of one section, one after the other, whose changes are the same when counted from their n."""

    hooks: list[HookDiff]
    lines: list[str]

    def takes(self, hook: HookDiff, lines: list[str]) -> bool:
        return self.hooks[-1].hook.n + 1 == hook.hook.n and self.lines == lines


def _groups(hooks: Sequence[HookDiff]) -> list[list[HookDiff]]:
    """Hooks that differ, in groups of those that differ alike, by the first of each."""
    groups: list[_Group] = []
    latest: dict[Section, _Group] = {}
    for hook in filter(_differs, hooks):
        name = _relative_to(hook.hook.n)
        lines = [f"{change.kind} {_line(change, name)}" for change in hook.changes]
        group = latest.get(hook.hook.section)
        if group is not None and group.takes(hook, lines):
            group.hooks.append(hook)
        else:
            latest[hook.hook.section] = _Group([hook], lines)
            groups.append(latest[hook.hook.section])
    found: list[list[HookDiff]] = []
    for group in groups:
        found += [group.hooks] if len(group.hooks) >= MIN_RUN else [[hook] for hook in group.hooks]
    return found


def _group_text(hooks: list[HookDiff]) -> Text:
    """A heading with the peak, and a line for each change."""
    first, last = hooks[0], hooks[-1]
    heading = str(first.hook) if first is last else f"{first.hook.section} n, n = {first.hook.n} to {last.hook.n}"
    out = Text.assemble((heading, "bold"), f"   {_bytes(hooks)}\n")
    for kind, line in _runs(first.changes) if first is last else _each(first.changes, first.hook.n):
        sign, style = _SIGNS[kind]
        out.append(f"  {sign} ", style).append(f"{visible(line)}\n")
    return out


def _bytes(hooks: list[HookDiff]) -> str:
    """The peak during a hook, the highest of several."""
    one, other = ([hook.before_bytes for hook in hooks], [hook.after_bytes for hook in hooks])
    most = "" if len({*one}) == len({*other}) == 1 else "at most "
    shown = [_size(max((value for value in side if value is not None), default=None)) for side in (one, other)]
    return f"peak {most}{shown[0]}" + (f" -> {shown[1]}" if one != other else "")


def _size(size_bytes: int | None) -> str:
    return "none" if size_bytes is None else size(size_bytes)


def _each(changes: Sequence[StepChange], n: int) -> Iterator[tuple[ChangeKind, str]]:
    yield from ((change.kind, _line(change, _relative_to(n))) for change in changes)


def _runs(changes: Sequence[StepChange]) -> Iterator[tuple[ChangeKind, str]]:
    """A line for each change; one for a run of ops that follow each other and differ alike."""
    start = 0
    while start < len(changes):
        stop = start + 1
        while stop < len(changes) and _continues(changes[stop - 1], changes[stop]):
            stop += 1
        first = changes[start]
        if stop - start >= MIN_RUN and isinstance(first.step, OpStep):
            n = first.step.op.first
            yield first.kind, _line(first, _relative_to(n), f", n = {n} to {n + stop - start - 1}")
        else:
            yield from ((change.kind, _line(change, str)) for change in changes[start:stop])
        start = stop


def _continues(change: StepChange, following: StepChange) -> bool:
    """Whether the next change is the same for the next module."""
    one, other = change.step, following.step
    if not isinstance(one, OpStep) or not isinstance(other, OpStep) or other.op.first != one.op.first + 1:
        return False
    names = _relative_to(one.op.first), _relative_to(other.op.first)
    return change.kind is following.kind and _line(change, names[0]) == _line(following, names[1])


def _relative_to(n: int) -> Namer:
    """Names an op of one module by its distance to n, as schedules do; others by their number."""

    def name(text: str) -> str:
        try:
            op = OpId.parse(text)
        except ValueError:
            return text
        if op.first != op.last:
            return text
        index = "n" if op.first == n else f"<n{op.first - n:+d}>"
        return f"{op.family}_{index}" + (f"[{op.piece}/{op.pieces}]" if op.pieces > 1 else "")

    return name


def _line(change: StepChange, name: Namer, these: str = "") -> str:
    """What a change is about (`these`: for which n), and what differs."""
    step = change.step
    if isinstance(step, OpStep):
        subject = name(str(step.op))
    else:
        subject = f"wait {', '.join(name(str(op)) for op in step.after) or 'for nothing'}"
    parts = [f"from {_hook(change.source, name)}"] if change.source is not None else []
    if change.kind in (ChangeKind.ADDED, ChangeKind.REMOVED) and isinstance(step, OpStep):
        parts.append(f"on {step.lane}")
        parts += [f"waits for {', '.join(name(str(op)) for op in step.waits)}"] * bool(step.waits)
    parts += [_field(field, name) for field in change.fields]
    return f"{subject}{these}   {'; '.join(parts)}" if parts else subject + these


def _hook(hook: Hook, name: Namer) -> str:
    if hook.section is Section.ROOT:
        return str(hook)
    index = name(str(OpId("hook", hook.n))).removeprefix("hook_")
    return f"{hook.section} {index}"


def _field(field: FieldChange, name: Namer) -> str:
    one, other = (", ".join(map(name, side) if field.name in _OPS else side) for side in (field.before, field.after))
    if field.name == "follows":
        return f"now {_behind(other)}, was {_behind(one)}"
    return f"{field.name}: {one or 'none'} -> {other or 'none'}"


def _behind(ahead: str) -> str:
    return f"behind {ahead.replace('wait, ', 'wait ', 1)}" if ahead else "first"


def _summary(found: PlanDiff) -> Text:
    before, after = found.before, found.after
    if found.equal:
        return Text("no difference: both run the same ops in the same way\n", "bold green")
    peaks = [f"{size(plan.peak_bytes)} in {moment(plan.peak_hook, plan.peak_backwards)}" for plan in (before, after)]
    change = after.peak_bytes - before.peak_bytes
    by = f" ({'+' if change > 0 else '-'}{size(abs(change))})" if change else ""
    counts = [f"{found.count(kind)} {kind}" for kind in ChangeKind if found.count(kind)]
    return Text.assemble(
        f"peak communication memory: {peaks[0]} -> {peaks[1]}{by}\n" if peaks[0] != peaks[1] else f"peak: {peaks[0]}\n",
        f"waits: {before.num_waits} -> {after.num_waits}\n",
        (f"steps: {', '.join(counts) or 'no difference'}\n", "bold"),
    )
