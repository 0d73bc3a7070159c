"""YAML files that are one record each, as profiles and presets: read whole, or everything that is wrong with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from commplan.errors import CommplanError
from commplan.language.source import shown

_MAX_REPORTED: Final = 20

Record = TypeVar("Record", bound=BaseModel)


def read_yaml(text: str, file: str, model: type[Record], form: str) -> Record:
    """The record that `text` spells.

    Args:
        file: names it in messages.
        form: what it should be, in words.

    Raises:
        CommplanError: naming the place of everything (of the first 20 things) that is wrong.
    """
    try:
        data = YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark is not None else "1:1"
        raise CommplanError(f"{file}:{place}: not YAML: {error.problem}") from error
    # IndexError and KeyError: tags such as `!!int ''`.
    except (YAMLError, ValueError, RecursionError, IndexError, KeyError) as error:
        raise CommplanError(f"{file}: not YAML: {shown(str(error), 120)}") from error
    if not isinstance(data, dict):
        raise CommplanError(f"{file}:1:1: {form}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{file}:{_place(data, e['loc'])}: {_path(e['loc'])}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        rest = [f"and {len(lines) - _MAX_REPORTED} more"] if len(lines) > _MAX_REPORTED else []
        raise CommplanError("\n".join([*lines[:_MAX_REPORTED], *rest])) from error


def validated(data: object, model: type[Record], hint: Callable[[Sequence[int | str]], str]) -> Record:
    """The record that holds `data`, which no file spells.

    Args:
        hint: what to change where a value is wrong, by the path to it, in words.

    Raises:
        CommplanError: naming everything (the first 20 things) that is wrong, and what to change.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [f"{_path(e['loc'])}: {e['msg'].removeprefix('Value error, ')}: {hint(e['loc'])}" for e in error.errors()]
        raise CommplanError("\n".join(lines[:_MAX_REPORTED])) from error


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(key if str(key).isprintable() else shown(str(key)) for key in map(str, loc)) or "the file"


def _place(data: Any, loc: tuple[int | str, ...]) -> str:
    """`line:column` of the innermost part of `loc` that is there."""
    place = (0, 0)
    for key in loc:
        lc = getattr(data, "lc", None)
        try:
            found = data[key]
            place = lc.value(key) if lc is not None and isinstance(data, dict) else lc.item(key) if lc is not None else place
            data = found
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return f"{place[0] + 1}:{place[1] + 1}"
