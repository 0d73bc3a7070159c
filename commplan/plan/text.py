"""A plan for people: one line a step, hooks as headings, a column for each lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from commplan.ops import Kind, OpId, Section, When
from commplan.plan.model import Backwards, BufferKind, Hook, OpStep, Plan, Step
from commplan.plan.order import lane_of

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_OF: Final = {Backwards.EVERY: "", Backwards.EARLIER: " of a backward before the last", Backwards.LAST: " of the last backward"}
_MIN_COLUMN: Final = 8
_INDENT: Final = "  "
_LEGEND: Final = "<- X: waits for X   (X): named in the schedule, and implied by lanes and earlier waits"


def text(plan: Plan) -> str:
    """`plan` as text: a summary, a heading for each hook, and each step in the column of its lane with what it waits for."""
    return "\n\n".join(blocks(plan)) + "\n"


def blocks(plan: Plan) -> list[str]:
    """The text of `plan` in parts: what stands above the hooks, and each hook."""
    lanes = [lane.name for lane in plan.lanes]
    widths = {lane: max(_MIN_COLUMN, len(lane), *(len(_what(s)) for s in plan.steps if lane_of(s) == lane)) for lane in lanes}
    params = "".join(f" {name}={value}" for name, value in plan.params)
    columns = _INDENT + "  ".join(lane.ljust(widths[lane]) for lane in lanes)
    parts = [[f"plan {plan.schedule}{params}", summary(plan), "", *_legend(plan), columns]]
    parts += ([_heading(plan, hook), *(_row(step, lanes, widths) for step in hook.steps)] for hook in plan.hooks)
    return ["\n".join(row.rstrip() for row in part) for part in parts]


def summary(plan: Plan) -> str:
    """One line: modules, ops, waits, lanes, peak communication bytes, and what of them are partial sums."""
    num_ops = sum(isinstance(step, OpStep) for step in plan.steps)
    num_modules = sum(hook.section is Section.POST_BACKWARD for hook in plan.hooks)
    parts = [
        _plural(num_modules, "module"),
        _plural(num_ops, "op"),
        _plural(plan.num_waits, "wait"),
        f"lanes {', '.join(lane.name for lane in plan.lanes)}",
        f"peak {size(plan.peak_bytes)} of communication memory in {moment(plan.peak_hook, plan.peak_backwards)}",
    ]
    if plan.partial_sum_bytes:
        parts.append(f"partial sums across microbatches {size(plan.partial_sum_bytes)}")
    parameter_bytes = plan.peak_bytes_of(BufferKind.PARAMETER)
    if parameter_bytes:
        parts.append(f"gathered parameters {size(parameter_bytes)}")
    return "; ".join(parts)


def moment(hook: Hook, backwards: Backwards) -> str:
    """A hook, and of which backward of an accumulated step, if they are not all alike."""
    return f"{hook}{_OF[backwards]}"


def size(size_bytes: int) -> str:
    """A number of bytes in the largest unit that leaves at least one: `34.0 MiB`; exact below 1 KiB."""
    value, unit = float(size_bytes), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size_bytes} B"


def _legend(plan: Plan) -> Iterator[str]:
    if any(step.waits or _implied(step) for step in plan.steps):
        yield _LEGEND
        yield ""


def _heading(plan: Plan, hook: Hook) -> str:
    if hook.section is Section.ROOT:
        return "root: all gradients are complete"
    name = plan.modules.modules[hook.module].name
    if hook.section is Section.PRE_BACKWARD:
        return f"{hook}: before backward of {name}"
    return f"{hook}: gradients of {name} are complete"


def _row(step: Step, lanes: Sequence[str], widths: dict[str, int]) -> str:
    own = lane_of(step)
    cells = [(_what(step) if lane == own else "").ljust(widths[lane]) for lane in lanes]
    return _INDENT + "  ".join(cells) + "  " + _reasons(step)


def _what(step: Step) -> str:
    return str(step.op) if isinstance(step, OpStep) else "wait"


def _reasons(step: Step) -> str:
    order = [f"<- {', '.join(map(str, step.waits))}"] if step.waits else []
    implied = _implied(step)
    if implied:
        order.append(f"({', '.join(map(str, implied))})")
    parts = [" ".join(order)] if order else []
    if isinstance(step, OpStep):
        if step.dtype is not None:
            parts.append(f"in {step.dtype}")
        if step.when is not When.EVERY:
            parts.append("in the last backward only")
    return ", ".join(parts)


def _implied(step: Step) -> list[OpId]:
    """What a step was asked to wait for and need not, apart from computes, which are over when its hook opens."""
    return [op for op in step.after if op not in step.waits and op.family != Kind.COMPUTE]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
