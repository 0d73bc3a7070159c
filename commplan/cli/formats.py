"""The formats of `commplan check`, and what writes each that is for a program."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

from commplan.cli import github, render, sarif
from commplan.cli.render import FileReport


class Format(StrEnum):
    """How `check` prints findings."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def _json(reports: Sequence[FileReport]) -> str:
    return json.dumps(render.report_json(reports), indent=2)


def _sarif(reports: Sequence[FileReport]) -> str:
    return json.dumps(sarif.report_sarif(reports, Path.cwd()), indent=2)


def _github(reports: Sequence[FileReport]) -> str:
    return github.report_github(reports, Path.cwd())


WRITERS: Final[Mapping[Format, Callable[[Sequence[FileReport]], str]]] = MappingProxyType(
    {Format.JSON: _json, Format.SARIF: _sarif, Format.GITHUB: _github}
)
