"""Commands as processes: exit codes, terminals, pipes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import BAD


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commplan", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_exit_codes_of_a_process(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    assert in_a_process("check", "blocking").returncode == 0
    assert in_a_process("check", str(bad)).returncode == 1
    missing = in_a_process("check", "missing.yaml")
    assert missing.returncode == 2
    assert "Traceback" not in missing.stdout + missing.stderr


def test_a_terminal_that_lacks_characters_is_no_fault(tmp_path: Path) -> None:
    schedule = tmp_path / "wide.yaml"
    schedule.write_text(BAD.replace("For a test.", "管道").replace("afer", "管"), encoding="utf-8")
    done = in_a_process("check", str(schedule), PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "fault in commplan" not in done.stderr
    assert "\\u7ba1" in done.stdout


@pytest.mark.parametrize("arguments", [("list",), ("explain",), ("schema",), ("plan", "blocking", "--modules", "500")])
def test_a_reader_that_stops_reading_is_no_fault_and_no_exit_code_of_ours(arguments: tuple[str, ...]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "commplan", *arguments]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "commplan", "check", "blocking"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "commplan: No space left on device\n")


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_only_on_a_terminal(tmp_path: Path, variables: dict[str, str], coloured: bool) -> None:
    schedule = tmp_path / "bad.yaml"
    schedule.write_text(BAD)
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLORTERM"}}
    command = [sys.executable, "-m", "commplan", "check", str(schedule)]
    process = subprocess.Popen(command, stdout=theirs, env=environment | {"TERM": "xterm-256color"} | variables)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # how a terminal says that its other end is closed
    os.close(ours)
    assert process.wait() == 1
    assert (re.search(rb"\x1b\[[\d;]*3\d", shown) is not None) is coloured
    assert b"\x1b" not in in_a_process("check", str(schedule)).stdout.encode()
