"""The schedules in tests/cases: each of `err` has exactly the findings in the file beside it, those of `ok` have no errors.

Comments at the top say what a schedule is checked with (`tests/given.py`).
"""

from pathlib import Path

import pytest

from commplan.errors import Severity, Violation
from tests import given

CASES = Path(__file__).parent / "cases"
ERR = sorted((CASES / "err").glob("*.yaml"))
OK = sorted((CASES / "ok").glob("*.yaml"))


def findings(path: Path) -> tuple[Violation, ...]:
    return given.findings(path.read_bytes().decode("latin-1"), path)


@pytest.mark.parametrize("path", ERR, ids=lambda path: path.stem)
def test_findings_are_the_expected_ones(path: Path) -> None:
    found = [f"{v.span.line}:{v.span.column}: {v.code} {v.message}" for v in findings(path)]
    assert found == path.with_suffix(".expected").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", OK, ids=lambda path: path.stem)
def test_right_schedules_have_no_errors(path: Path) -> None:
    assert [str(v) for v in findings(path) if v.severity is Severity.ERROR] == []


def test_every_expectation_has_its_schedule() -> None:
    assert sorted(path.stem for path in (CASES / "err").glob("*.expected")) == [path.stem for path in ERR]
    assert ERR
    assert OK
