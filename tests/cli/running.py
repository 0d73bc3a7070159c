"""What tests of commands share: the type of the fixture `run`, and schedules to give to it."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


Run = Callable[..., Result]

GOOD = """\
version: 1
name: good
summary: For a test.
post_backward:
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
  - wait: RS_<n-1>
root:
  - apply_n: {after: AR_n}
"""
BAD = GOOD.replace("{after: RS_n}", "{afer: RS_n}")
FINDING = re.compile(r"^[^:\n]+:\d+:\d+: CP\d{3} .+", re.MULTILINE)


def write(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def feed(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
