"""Files that commands write: checked before the work, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import typer

from commplan.language.source import shown


def require_place(option: str, path: Path | None) -> None:
    """Check before the work that a file can be written.

    Raises:
        typer.BadParameter: it can't.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {shown(str(folder))}", param_hint=option)
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{shown(str(path))} can't be written", param_hint=option)


def require_places(paths: Mapping[str, Path | None]) -> None:
    """Check before the work that files can be written, each of its own; options -> paths.

    Raises:
        typer.BadParameter: they can't.
    """
    options: dict[Path, str] = {}
    for option, path in paths.items():
        require_place(option, path)
        if path is None or (path.exists() and not path.is_file()):
            continue
        if (other := options.setdefault(path.resolve(), option)) != option:
            raise typer.BadParameter(f"{shown(str(path))} is that of {other}: one would replace the other", param_hint=option)


def told_if_replaced(path: Path) -> None:
    """Say on standard error that a file is about to be replaced."""
    if path.is_file():
        typer.echo(f"warning: {path} was there already; it is replaced", err=True)


def write_whole(path: Path, text: str) -> None:
    """Let `path` hold `text`; nobody ever sees a part of it.

    Raises:
        OSError: it can't be written; what was there before is there still.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # /dev/stdout, a pipe
        return
    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
