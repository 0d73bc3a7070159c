"""Write, check and run schedules for the gradient communication of an HSDP backward.

`compile` and `check` work without torch; `attach` and `describe` load it when first used.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from commplan.compiler import check, compile  # noqa: A004 - as `re.compile`
from commplan.errors import (
    AttachError,
    CommplanError,
    ExecutionError,
    PlanError,
    ScheduleError,
    UnsupportedError,
    Violation,
)
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.plan import Plan

if TYPE_CHECKING:
    from commplan.fsdp2 import attach, describe

try:
    __version__ = version("commplan")
except PackageNotFoundError:  # a bare checkout
    __version__ = "0+unknown"

_TORCH_SIDE = ("attach", "describe")


def __getattr__(name: str) -> Any:
    """`attach` and `describe`, which need torch."""
    if name in _TORCH_SIDE:
        from commplan import fsdp2

        return getattr(fsdp2, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttachError",
    "CommplanError",
    "ExecutionError",
    "Module",
    "ModuleTable",
    "Parameter",
    "Plan",
    "PlanError",
    "ScheduleError",
    "UnsupportedError",
    "Violation",
    "attach",
    "check",
    "compile",
    "describe",
]
