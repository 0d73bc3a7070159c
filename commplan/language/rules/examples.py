"""Small schedules for the documentation of rules."""

from __future__ import annotations

from typing import Final

HEAD: Final = "version: 1\nname: example\n"

WAIT: Final = "  - wait: RS_<n-1>\n"
RS: Final = "  - RS_n: {after: compute_n}\n"
AR: Final = "  - AR_n: {after: RS_n}\n"
APPLY: Final = "  - apply_n: {after: AR_n}\n"

RIGHT: Final = f"{HEAD}post_backward:\n{WAIT}{RS}{AR}root:\n{APPLY}"
"""A short schedule in which nothing is to be found."""


def example(rs: str = RS, ar: str = AR, apply: str = APPLY, *, before: str = "") -> str:
    """The schedule `RIGHT` with some of its lines, or what stands before them, written otherwise."""
    rs, ar, apply = (line if line.endswith("\n") else f"  - {line}\n" for line in (rs, ar, apply))
    return f"{HEAD}{before}post_backward:\n{WAIT}{rs}{ar}root:\n{apply}"
