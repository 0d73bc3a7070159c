"""A throwaway environment with one torch release: made, asked, used, deleted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
WHAT_IS_THERE: Final = """
import platform, torch
from commplan.fsdp2 import torch_releases
print(torch.__version__, platform.python_version(), torch_releases.fingerprint())
"""


class InstallError(Exception):
    """pip could not make the environment; says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an environment turned out to hold."""

    torch: str
    python: str
    fingerprint: str


class Environment:
    """A virtual environment in `folder`.

    Args:
        base: the Python to make it with.
    """

    def __init__(self, folder: Path, base: str) -> None:
        self.folder = folder
        self.python = folder / "environment" / "bin" / "python"
        self._base = base

    def install(self, version: str, index_url: str | None) -> None:
        """Install torch from `index_url` (None: pip's own), and what the project needs besides from pip's own.

        Raises:
            InstallError: pip failed.
        """
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        pip += ["--no-cache-dir", "--progress-bar", "off"]
        torch = f"torch=={version}"
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join([torch, *other_constraints()]))
        commands = (
            [self._base, "-m", "venv", str(self.python.parents[1])],
            [*pip, *(["--index-url", index_url] if index_url else []), torch],
            [*pip, "--constraint", str(constraints), torch, *requirements()],
        )
        for command in commands:
            code, text = run(command, None)
            if code != 0:
                raise InstallError(text[-2000:].strip())

    def look(self) -> Found:
        """Import torch and commplan.

        Raises:
            InstallError: one of them can't be imported.
        """
        code, text = run([str(self.python), "-c", WHAT_IS_THERE], None)
        if code != 0:
            raise InstallError(text[-2000:].strip())
        return Found(*text.split()[-3:])

    def test(self, tests: Sequence[str], timeout_s: float) -> tuple[int, str, Path]:
        """Run pytest on `tests`. Returns exit status, output, and where the JUnit file should be."""
        report = self.folder / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code, text = run([str(self.python), "-m", "pytest", *options, *tests], timeout_s)
        return code, text, report


@contextmanager
def throwaway(base: str) -> Iterator[Environment]:
    """An environment that is deleted whatever happens, signals that ask for an end included."""
    folder = Path(tempfile.mkdtemp(prefix="commplan-torch-"))
    try:
        yield Environment(folder, base)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(command: Sequence[str], timeout_s: float | None) -> tuple[int, str]:
    """Run a command in the checkout. Returns exit status (124: out of time) and output; ends all that it started."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout_s)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        return 124, f"{' '.join(command[:4])} took more than {timeout_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def requirements() -> list[str]:
    """What the project and its tests need, torch apart."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [r for r in (*project["dependencies"], *project["optional-dependencies"]["test"]) if _name(r) != "torch"]


def other_constraints() -> list[str]:
    """The releases that the project is tested with, torch apart."""
    lines = (ROOT / "tools" / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#") and _name(line) != "torch"]


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, which a shell lets what it starts in the background ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
