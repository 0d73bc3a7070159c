"""`Plan`: steps by hook, lanes, minimal waits, buffers; its text form, digest and JSON."""

from commplan.plan.lower import lower
from commplan.plan.model import (
    Buffer,
    BufferKind,
    Hook,
    LaneInfo,
    OpStep,
    Plan,
    Step,
    WaitStep,
)

__all__ = ["Buffer", "BufferKind", "Hook", "LaneInfo", "OpStep", "Plan", "Step", "WaitStep", "lower"]
