"""`Plan`: steps by hook, lanes, minimal waits, buffers; its text form, digest and JSON."""

from commplan.plan.lower import lower
from commplan.plan.model import (
    Backwards,
    Buffer,
    BufferKind,
    Hook,
    LaneInfo,
    OpStep,
    Plan,
    Step,
    WaitStep,
)
from commplan.plan.rules import RULES, check, check_growth

__all__ = [
    "RULES",
    "Backwards",
    "Buffer",
    "BufferKind",
    "Hook",
    "LaneInfo",
    "OpStep",
    "Plan",
    "Step",
    "WaitStep",
    "check",
    "check_growth",
    "lower",
]
