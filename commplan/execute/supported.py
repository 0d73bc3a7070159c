"""What this executor can't run, told from the plan before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from commplan.errors import UnsupportedError
from commplan.ops import Kind, When
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


def refuse_unsupported(plan: Plan) -> None:
    """Check that the executor can run every step of `plan`.

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
        places = "; ".join(f"{step.span or plan.schedule}: `{attribute}` ({step.op})" for attribute, step in found.items())
        raise UnsupportedError(
            f"this version can check and plan the schedule, but not run it: {places}. "
            "Take these attributes out, or attach a schedule without them."
        )
