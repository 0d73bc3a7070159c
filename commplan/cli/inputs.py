"""What a user passes on the command line, turned into what the compiler takes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import typer

from commplan.errors import CommplanError
from commplan.language import library, load_table
from commplan.language.modules import ModuleTable

MAX_FILE_BYTES: Final = 1 << 20
MAX_NUM_MODULES: Final = 100_000


class UnreadableError(Exception):
    """A schedule file that cannot be read as text; the message says why, without the name of the file."""


def locate(name: str) -> Path:
    """The file that `name` means: a path, or else the name of a schedule of the library.

    Raises:
        UnreadableError: if it is neither.
    """
    path = Path(name)
    if path.exists() or path.is_symlink():
        return path
    names = library.names()
    if name in names:
        return library.find(name)
    close = difflib.get_close_matches(Path(name).stem, names, n=1)
    raise UnreadableError(f"no such file, and no schedule of the library{did_you_mean(close)}")


def read_text(path: Path) -> str:
    """The text of a schedule file.

    Raises:
        UnreadableError: if it is no readable file of UTF-8 text of at most `MAX_FILE_BYTES`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UnreadableError((error.strerror or str(error)).lower()) from error
    if len(data) > MAX_FILE_BYTES:
        raise UnreadableError(f"larger than {MAX_FILE_BYTES >> 20} MiB, so hardly a schedule")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start})") from error
    if "\0" in text:
        raise UnreadableError("a binary file, not text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def modules_option(value: str) -> int | ModuleTable:
    """`--modules`: how many modules, or the path of a module table in JSON.

    Raises:
        typer.BadParameter: if it is neither, or the table cannot be used.
    """
    if re.fullmatch(r"[+-]?\d+", value, re.ASCII):
        # int() refuses thousands of digits with an exception of its own
        count = int(value) if len(value) < 10 else MAX_NUM_MODULES + 1
        if not 1 <= count <= MAX_NUM_MODULES:
            raise typer.BadParameter(f"expected 1 to {MAX_NUM_MODULES} modules, got {value[:20]}")
        return count
    path = Path(value)
    if not path.exists():
        raise typer.BadParameter(f"{value!r} is neither a number of modules nor an existing file")
    try:
        return load_table(path)
    except OSError as error:
        raise typer.BadParameter(f"{value}: {(error.strerror or str(error)).lower()}") from error
    except CommplanError as error:
        raise typer.BadParameter(str(error)) from error


def settings_option(values: Sequence[str]) -> dict[str, int]:
    """`--set k=3`, given any number of times.

    Raises:
        typer.BadParameter: if one is not NAME=INTEGER, or a name is set twice.
    """
    settings: dict[str, int] = {}
    for value in values:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([+-]?\d{1,9})\s*", value, re.ASCII)
        if match is None:
            raise typer.BadParameter(f"expected NAME=INTEGER as in --set k=3, got {value!r}")
        if match[1] in settings:
            raise typer.BadParameter(f"{match[1]} is set twice")
        settings[match[1]] = int(match[2])
    return settings


def did_you_mean(close: Iterable[str]) -> str:
    """The tail of a message that offers the first close match; empty where there is none."""
    return next((f"; did you mean {name}?" for name in close), "")


def require_known(settings: Iterable[str], declared: Iterable[str]) -> None:
    """Check that each param that was set is one of those that some schedule declares.

    Raises:
        typer.BadParameter: naming the first that is not.
    """
    known = sorted(set(declared))
    for name in settings:
        if name not in known:
            have = f"params: {', '.join(known)}" if known else "no params"
            close = did_you_mean(difflib.get_close_matches(name, known, n=1))
            raise typer.BadParameter(f"{name} is not a param of any schedule given ({have}){close}", param_hint="--set")
