"""tools/torch_matrix with a stand-in for Python: what it makes, counts, tells apart, and always deletes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PYTHON = """#!/bin/sh
# Called as `python -m venv DIR`, and as DIR/bin/python for all that follows.
case "$1 $2" in
    "-m venv")
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
        echo "$3" >> LOG/folders;;
    "-m pip")
        echo "$*" >> LOG/pip
        case "$*" in *torch==9.8*) echo "no matching distribution"; exit 1;; esac;;
    "-m pytest")
        echo "$*" >> LOG/pytest
        [ -z "$MATRIX_HANGS" ] || sleep 600
        [ -z "$MATRIX_DIES" ] || exit 139
        for word; do case "$word" in --junitxml=*) report=${word#--junitxml=};; esac; done
        cp LOG/report.xml "$report"
        grep -q "<failure" "$report" && exit 1;;
    *)
        echo "9.9.0+cpu 3.11.7 0123456789abcdef";;
esac
exit 0
"""
CASES = """<testsuites><testsuite>
<testcase classname="tests.a" name="right"/><testcase classname="tests.a" name="too"/>
<testcase classname="tests.a" name="absent"><skipped type="pytest.skip" message="FSDP2 has no such setting"/></testcase>
<testcase classname="tests.a" name="known"><skipped type="pytest.xfail" message="because"/></testcase>
{more}</testsuite></testsuites>"""
FAILURE = '<testcase classname="tests.a" name="wrong"><failure message="1 is not 2"/></testcase>'


class Matrix:
    """The tool in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        python = folder / "python"
        python.write_text(PYTHON.replace("LOG", str(folder)))
        python.chmod(0o755)
        self.report("")
        self.json = folder / "out.json"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()

    def report(self, more: str) -> None:
        """Let tests end in these cases."""
        (self.folder / "report.xml").write_text(CASES.format(more=more))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start the tool."""
        command = [sys.executable, "-m", "torch_matrix_run", "--python", str(self.folder / "python")]
        return subprocess.Popen(
            [*command, "--json", str(self.json), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tools"), "TMPDIR": str(self.temporary), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Run it. Returns exit status, stdout, stderr; nothing may be left of its environments."""
        process = self.start(*arguments, **variables)
        out, err = process.communicate()
        self.assert_clean()
        return process.returncode, out, err

    def assert_clean(self) -> None:
        assert not list(self.temporary.iterdir())

    def said(self, what: str) -> str:
        """What the stand-in was called with."""
        return (self.folder / what).read_text()


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return Matrix(tmp_path)


def test_counts_and_reasons(matrix: Matrix) -> None:
    code, out, err = matrix.run("9.9.0")
    assert code == 0
    cells = [cell.strip() for cell in out.splitlines()[-1].strip("|").split("|")]
    assert cells[:8] == ["9.9.0+cpu", "3.11.7", "0123456789abcdef", "passed", "2", "0", "1", "1"]
    assert "skipped 1: FSDP2 has no such setting" in err
    (release,) = json.loads(matrix.json.read_text())["releases"]
    assert release["counts"]["passed"] == 2
    assert release["counts"]["skips"] == {"FSDP2 has no such setting": 1}
    assert "tests/worlds" in matrix.said("pytest")


def test_a_failure_is_named_and_the_next_release_still_runs(matrix: Matrix) -> None:
    matrix.report(FAILURE)
    code, out, err = matrix.run("9.9.0", "9.9.1")
    assert code == 1
    assert out.count("| failed") == 3  # a column, two rows
    assert "failed: tests.a::wrong: 1 is not 2" in err
    assert len(set(matrix.said("folders").split())) == 2


def test_a_release_that_is_not_there_is_told_apart(matrix: Matrix) -> None:
    code, out, err = matrix.run("9.8.0", "9.9.0")
    assert code == 3
    assert "not installed" in out.splitlines()[2]
    assert "passed" in out.splitlines()[3]
    assert "no matching distribution" in err
    matrix.report(FAILURE)
    assert matrix.run("9.8.0", "9.9.0")[0] == 1


def test_tests_that_die_without_a_report_have_failed(matrix: Matrix) -> None:
    code, out, err = matrix.run("9.9.0", MATRIX_DIES="1")
    assert code == 1
    assert "| failed" in out.splitlines()[-1]
    assert "no report of the tests" in err


def test_tests_that_hang_are_ended(matrix: Matrix) -> None:
    code, _, err = matrix.run("9.9.0", "--timeout-s", "0.5", MATRIX_HANGS="1")
    assert code == 1
    assert "took more than" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(matrix: Matrix, number: signal.Signals) -> None:
    process = matrix.start("9.9.0", MATRIX_HANGS="1")
    while not (matrix.folder / "pytest").exists():
        assert process.poll() is None
        time.sleep(0.02)
    assert list(matrix.temporary.iterdir())
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    matrix.assert_clean()


def test_torch_comes_from_the_index_and_only_torch_is_another(matrix: Matrix) -> None:
    matrix.run("9.9.0", "--index-url", "https://example.org/cpu", "--tests", "tests/execute")
    first, second = matrix.said("pip").splitlines()
    assert "--index-url https://example.org/cpu torch==9.9.0" in first
    assert "--index-url" not in second
    for requirement in ("torch==9.9.0", "pydantic", "pytest"):
        assert requirement in second
    assert second.count("torch==") == 1
    assert matrix.said("pytest").split()[-1] == "tests/execute"


def test_wrong_arguments(matrix: Matrix) -> None:
    assert matrix.run()[0] == 2
