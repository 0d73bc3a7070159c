"""Write, check and run schedules for the gradient communication of an HSDP backward.

`compile` and `check` work without torch; `attach` and `describe` load it when first used.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from commplan.compiler import check, compile  # noqa: A004 - as `re.compile`
from commplan.errors import (
    AttachError,
    CollectiveTimeoutError,
    CommplanError,
    DivergenceError,
    ExecutionError,
    PlanError,
    RankMismatchError,
    ScheduleError,
    Violation,
)
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.plan import Plan

if TYPE_CHECKING:
    from commplan.fsdp2 import Attachment, Options, attach, describe

try:
    __version__ = version("commplan")
except PackageNotFoundError:  # a bare checkout
    __version__ = "0+unknown"

# Whether and where messages appear is for the program to say.
logging.getLogger("commplan").addHandler(logging.NullHandler())

_TORCH_SIDE = ("Attachment", "Options", "attach", "describe")


def __getattr__(name: str) -> Any:
    """`attach` and what belongs to it, which need torch."""
    if name in _TORCH_SIDE:
        try:
            from commplan import fsdp2
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"commplan.{name} needs torch, which is not installed here: `pip install torch`; the rest works without"
            raise ModuleNotFoundError(message, name="torch") from error
        return getattr(fsdp2, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AttachError",
    "Attachment",
    "CollectiveTimeoutError",
    "CommplanError",
    "DivergenceError",
    "ExecutionError",
    "Module",
    "ModuleTable",
    "Options",
    "Parameter",
    "Plan",
    "PlanError",
    "RankMismatchError",
    "ScheduleError",
    "Violation",
    "attach",
    "check",
    "compile",
    "describe",
]
