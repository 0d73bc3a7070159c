"""Module tables as JSON: reading them with errors that name the place of each wrong value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from commplan.errors import CommplanError
from commplan.language.modules import ModuleTable
from commplan.language.source import load_text, shown

MAX_TABLE_BYTES: Final = 64 * 1024 * 1024
_MAX_REPORTED: Final = 20
_WORDING: Final[Mapping[str, str]] = MappingProxyType(
    {"extra_forbidden": "unknown key", "missing": "is missing", "too_short": "at least one is needed"}
)


def parse_table(text: str, file: str = "<text>") -> ModuleTable:
    """The module table that `text` spells in JSON; `file` names it in messages.

    Raises:
        CommplanError: if it is not JSON, or naming the JSON path of every value (of the first 20) that is wrong.
    """
    try:
        json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise CommplanError(f"{file}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise CommplanError(f"{file}: not a module table: nested too deep") from error
    except ValueError as error:  # a key twice, or an integer of thousands of digits
        raise CommplanError(f"{file}: not a module table: {error}") from error
    try:
        return ModuleTable.model_validate_json(text, strict=True)
    except (ValidationError, ValueError) as error:
        raise CommplanError(_faults(error, file)) from error


def load_table(path: str | Path) -> ModuleTable:
    """The module table in a JSON file.

    Raises:
        CommplanError: if the file cannot be read or is no module table.
    """
    return parse_table(load_text(path, MAX_TABLE_BYTES, "a module table"), str(path))


def validate_table(data: Mapping[str, Any], file: str = "<dict>") -> ModuleTable:
    """The module table in a dictionary, of the form that its JSON has.

    Raises:
        CommplanError: naming the path of every value (of the first 20) that is wrong.
    """
    try:
        text = json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise CommplanError(f"{file}: not a module table: {error}") from error
    return parse_table(text, file)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} is written twice in one object")
    return entries


def _faults(error: ValueError, file: str) -> str:
    if not isinstance(error, ValidationError):
        return f"{file}: not a module table: {error}"
    faults = error.errors(include_url=False, include_context=False)
    # A list whose entries are wrong counts as too short as well; that adds nothing.
    parents = {fault["loc"][:depth] for fault in faults for depth in range(len(fault["loc"]))}
    faults = [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in parents]
    lines = [f"{file}: {_path(fault['loc'])}: {_WORDING.get(fault['type'], fault['msg'])}" for fault in faults]
    lines = [line.replace("Value error, ", "", 1) for line in lines]
    more = len(lines) - _MAX_REPORTED
    return "\n".join(lines[:_MAX_REPORTED] + ([f"{file}: and {more} more"] if more > 0 else []))


def _path(location: tuple[int | str, ...]) -> str:
    """`modules[2].parameters[0].shape`, from pydantic's location of a value."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).lstrip(".") or "the table"
