"""What this executor can't run, told from the plan before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from commplan.errors import Span, UnsupportedError
from commplan.language.spec import OpLine, ScheduleSpec
from commplan.ops import Kind, Section, When
from commplan.plan.model import OpStep, Plan

_BEYOND: Final[Mapping[str, Callable[[OpStep], bool]]] = MappingProxyType(
    {
        "AG": lambda step: step.kind is Kind.ALL_GATHER,
        "fuse": lambda step: len(step.op.members) > 1,
        "chunks": lambda step: step.op.pieces > 1,
        "dtype": lambda step: step.dtype is not None,
        "when: last_backward": lambda step: step.when is not When.EVERY,
        "communicator: own": lambda step: "@" in step.communicator,
    }
)
"""Attribute -> whether a step makes use of it."""


def refuse_unsupported(plan: Plan, spec: ScheduleSpec) -> None:
    """Check that the executor can run every step of `plan`, which was compiled from `spec`.

    Raises:
        UnsupportedError: names each attribute that it can't run, with one place where the schedule uses it.
    """
    found: dict[str, OpStep] = {}
    for step in plan.steps:
        if isinstance(step, OpStep):
            for attribute, is_used in _BEYOND.items():
                if is_used(step):
                    found.setdefault(attribute, step)
    if found:
        uses = "; ".join(f"{_place(attribute, step, spec)}: `{attribute}` ({step.op})" for attribute, step in found.items())
        raise UnsupportedError(
            f"this version can check and plan the schedule, but not run it: {uses}. "
            "Take these attributes out, or attach a schedule without them."
        )


def _place(attribute: str, step: OpStep, spec: ScheduleSpec) -> Span | str:
    """Where the schedule says so: at the attribute, at the lane that it belongs to, or at the op."""
    key = attribute.partition(":")[0]
    if key == "communicator":
        return next(lane.span for lane in spec.lanes if lane.name == step.lane)
    lines = (line for section in Section for line in spec.lines(section) if isinstance(line, OpLine))
    line = next(line for line in lines if line.ref.family == step.op.family)
    return line.spans.get(key, line.span)
