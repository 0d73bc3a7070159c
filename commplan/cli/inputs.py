"""What a user passes to options, turned into what the compiler takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import typer

from commplan.errors import CommplanError
from commplan.language import load_table
from commplan.language.modules import ModuleTable
from commplan.language.source import did_you_mean, shown

MAX_NUM_MODULES: Final = 100_000


def read_modules(value: str) -> int | ModuleTable:
    """`--modules`: how many modules, or the path of a module table in JSON.

    Raises:
        typer.BadParameter: if it is neither, or the table cannot be used.
    """
    if re.fullmatch(r"[+-]?\d+", value, re.ASCII):
        # int() refuses thousands of digits with an exception of its own
        count = int(value) if len(value) < 10 else MAX_NUM_MODULES + 1
        if not 1 <= count <= MAX_NUM_MODULES:
            raise typer.BadParameter(
                f"expected 1 to {MAX_NUM_MODULES} modules, not {shown(value)[1:-1]}", param_hint="--modules"
            )
        return count
    try:
        return load_table(value)
    except CommplanError as error:
        raise typer.BadParameter(f"expected a number of modules or a module table; {error}", param_hint="--modules") from error


def read_settings(values: Sequence[str]) -> dict[str, int]:
    """`--set k=3`, given any number of times.

    Raises:
        typer.BadParameter: if one is not NAME=INTEGER, or a name is set twice.
    """
    settings: dict[str, int] = {}
    for value in values:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([+-]?\d{1,9})\s*", value, re.ASCII)
        if match is None:
            raise typer.BadParameter(f"expected NAME=INTEGER as in --set k=3, not {shown(value)}", param_hint="--set")
        if match[1] in settings:
            raise typer.BadParameter(f"{shown(match[1])} is set twice", param_hint="--set")
        settings[match[1]] = int(match[2])
    return settings


def require_declared(settings: Mapping[str, int], declared: Iterable[str]) -> None:
    """Check that each param that is set is one that some schedule declares.

    Raises:
        typer.BadParameter: naming the first that is not.
    """
    known = set(declared)
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or "there are none"
            raise typer.BadParameter(f"no schedule here has a param {shown(name)}; {hint}", param_hint="--set")
