"""Every public case has a test that names it, and docs/cases.md shows them as they are."""

from __future__ import annotations

import pytest

from tests.public_cases import reports
from tests.public_cases.reports import KINDS, REPORTED, Row

ROWS = [*REPORTED, *KINDS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.reports[0])
def test_each_report_is_named_by_a_test(row: Row) -> None:
    assert set(row.reports) <= reports.marks().keys()


def test_no_test_names_a_report_that_is_not_listed() -> None:
    listed = [name for row in ROWS for name in row.reports]
    assert len(listed) == len(set(listed))
    assert reports.marks().keys() <= set(listed)


def test_the_page_is_in_step() -> None:
    assert reports.PAGE.read_text(encoding="utf-8") == reports.page(), "run python -m tests.public_cases.reports"
