"""The schedules in tests/cases: each of `err` has exactly the findings in the file beside it, those of `ok` have no errors.

Comments at the top say what a schedule is checked with (`tests/given.py`).  A file of `ok` whose name begins with a code is
the near miss of that rule: almost what it forbids, and right.  What warnings it has (never of its own code), it says itself.

`python -m tests.test_cases` writes the expected findings anew; read what it changed before you believe it.
"""

import re
from functools import cache
from pathlib import Path

import pytest

from commplan import compiler
from commplan.errors import Severity, Violation
from tests import given

CASES = Path(__file__).parent / "cases"
ERR = sorted((CASES / "err").glob("*.yaml"))
OK = sorted((CASES / "ok").glob("*.yaml"))


@cache
def findings(path: Path) -> tuple[Violation, ...]:
    return given.findings(path.read_bytes().decode("latin-1"), path)


def told(path: Path) -> list[str]:
    """Two lines for each finding: its place and message, and what to write instead."""
    return [
        line for v in findings(path) for line in (f"{v.span.line}:{v.span.column}: {v.code} {v.message}", f"  help: {v.hint}")
    ]


@pytest.mark.parametrize("path", ERR, ids=lambda path: path.stem)
def test_findings_are_the_expected_ones(path: Path) -> None:
    assert told(path) == path.with_suffix(".expected").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", ERR, ids=lambda path: path.stem)
def test_every_finding_says_what_to_write_instead(path: Path) -> None:
    assert [str(v) for v in findings(path) if not v.hint] == []


@pytest.mark.parametrize("path", OK, ids=lambda path: path.stem)
def test_right_schedules_have_no_errors(path: Path) -> None:
    assert [str(v) for v in findings(path) if v.severity is Severity.ERROR] == []


def test_every_expectation_has_its_schedule() -> None:
    assert sorted(path.stem for path in (CASES / "err").glob("*.expected")) == [path.stem for path in ERR]
    assert ERR
    assert OK


@pytest.mark.parametrize("code", compiler.RULES)
def test_every_rule_has_a_case_on_either_side(code: str) -> None:
    assert any(f" {code} " in path.with_suffix(".expected").read_text(encoding="utf-8") for path in ERR)
    assert any(path.stem.startswith(f"{code.lower()}_") for path in OK)


@pytest.mark.parametrize("path", [path for path in OK if re.match(r"cp\d", path.stem)], ids=lambda path: path.stem)
def test_a_near_miss_is_a_miss(path: Path) -> None:
    code = path.stem.split("_")[0].upper()
    assert code in compiler.RULES
    declared = re.findall(r"^# warnings: (.+)$", path.read_text(encoding="utf-8-sig"), re.MULTILINE)
    warned = [code for line in declared for code in line.split(", ")]
    assert code not in warned
    assert sorted({v.code for v in findings(path)}) == sorted(warned)


if __name__ == "__main__":
    for case in ERR:
        case.with_suffix(".expected").write_text("".join(f"{line}\n" for line in told(case)), encoding="utf-8")
