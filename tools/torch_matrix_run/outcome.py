"""What came out for each release: counts from pytest's JUnit file, a table, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

PASSED: Final = "passed"
FAILED: Final = "failed"
NOT_INSTALLED: Final = "not installed"
EXIT_CODES: Final = {PASSED: 0, FAILED: 1, NOT_INSTALLED: 3}
COLUMNS: Final = ("torch", "python", "fingerprint", "result", "passed", "failed", "skipped", "xfailed", "install s", "tests s")


@dataclass(slots=True)
class Counts:
    """Numbers of tests. `failures` are their names and the ends of what they said, `skips` reasons and how many gave each."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    xfailed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    skips: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """One release. `asked` is the version on the command line; `problem` says why there are no tests, or not all."""

    asked: str
    result: str
    torch: str = ""
    python: str = ""
    fingerprint: str = ""
    counts: Counts = field(default_factory=Counts)
    install_s: float = 0.0
    tests_s: float = 0.0
    problem: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        c = self.counts
        numbers = (c.passed, c.failed, c.skipped, c.xfailed) if self.result != NOT_INSTALLED else ("",) * 4
        return (
            self.torch or self.asked,
            self.python,
            self.fingerprint,
            self.result,
            *map(str, numbers),
            f"{self.install_s:.0f}",
            f"{self.tests_s:.0f}",
        )


def read_report(report: Path) -> Counts:
    """Counts of a JUnit file.

    Raises:
        OSError, ElementTree.ParseError: there is none, or not a whole one.
    """
    counts = Counts()
    skips: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        skip = case.find("skipped")
        wrong = [*case.iter("failure"), *case.iter("error")]
        if wrong:
            counts.failed += 1
            counts.failures[f"{case.get('classname')}::{case.get('name')}"] = (wrong[0].get("message") or "")[-2000:].strip()
        elif skip is None:
            counts.passed += 1
        elif skip.get("type") == "pytest.xfail":
            counts.xfailed += 1
        else:
            counts.skipped += 1
            skips[skip.get("message") or "no reason"] += 1
    counts.skips = dict(skips)
    return counts


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of a Markdown table."""
    rows = [COLUMNS, *(outcome.row for outcome in outcomes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        if number == 0:
            yield "| " + " | ".join("-" * width for width in widths) + " |"


def details(outcome: Outcome) -> Iterator[str]:
    """What the table has no room for."""
    name = outcome.torch or outcome.asked
    for failure, said in outcome.counts.failures.items():
        yield f"{name}: failed: {failure}: {said.splitlines()[-1] if said else ''}"
    for reason, number in outcome.counts.skips.items():
        yield f"{name}: skipped {number}: {reason}"
    if outcome.problem:
        yield f"{name}: {outcome.result}:"
        yield from (f"    {line}" for line in outcome.problem.splitlines()[-15:])


def as_json(outcomes: Sequence[Outcome], facts: dict[str, Any]) -> dict[str, Any]:
    """What `--json` writes."""
    return {**facts, "releases": [asdict(outcome) for outcome in outcomes]}


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """1 if tests of any release failed; else 3 if any could not be installed; else 0."""
    results = {outcome.result for outcome in outcomes}
    return next((EXIT_CODES[result] for result in (FAILED, NOT_INSTALLED) if result in results), 0)
