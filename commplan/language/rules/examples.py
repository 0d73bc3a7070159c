"""Small schedules for the documentation of rules."""

from __future__ import annotations

from typing import Final

HEAD: Final = "version: 1\nname: example\n"

RS: Final = "  - RS_n: {after: compute_n}\n"
AR: Final = "  - AR_n: {after: RS_n}\n"
APPLY: Final = "  - apply_n: {after: AR_n}\n"

RIGHT: Final = f"{HEAD}post_backward:\n{RS}{AR}{APPLY}"
"""The least schedule that is right."""


def example(rs: str = RS, ar: str = AR, apply: str = APPLY, *, before: str = "") -> str:
    """The least schedule with some of its lines, or what stands before them, written otherwise."""
    lines = (rs, ar, apply)
    return f"{HEAD}{before}post_backward:\n" + "".join(line if line.endswith("\n") else f"  - {line}\n" for line in lines)
