"""How findings look: the caret stands under its mark whatever the line holds; nothing of a file reaches the terminal raw."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from commplan.cli.render import MAX_LINE_COLUMNS, FileReport, finding_text, report_json, report_text, summary_text
from commplan.errors import Related, Severity, Span, Violation


def finding(text: str, column: int, length: int, **extra: object) -> Violation:
    return Violation("CP201", "a message", Span("a.yaml", 7, column, length, text), **extra)  # type: ignore[arg-type]


def columns_of_caret(caret_line: str) -> tuple[int, int]:
    return caret_line.index("^"), len(caret_line)


def test_a_finding_with_everything() -> None:
    related = Related("RS_n is issued here", Span("a.yaml", 3, 5, 4, "  - RS_n: {after: compute_n}"))
    violation = finding("  - AR_<n-1>: {after: RS_<n-1>}", 5, 8, hint="write AR_n", related=(related,))
    assert finding_text(violation).plain == (
        "a.yaml:7:5: CP201 a message\n"
        "    7 |   - AR_<n-1>: {after: RS_<n-1>}\n"
        "      |     ^^^^^^^^\n"
        "  note: a.yaml:3:5: RS_n is issued here\n"
        "    3 |   - RS_n: {after: compute_n}\n"
        "      |     ^^^^\n"
        "  help: write AR_n\n"
    )


def test_a_warning_says_so() -> None:
    assert finding_text(finding("", 1, 1, severity=Severity.WARNING)).plain == "a.yaml:7:1: CP201 a message (warning)\n"


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("\t- AR_n", "AR_n"),
        ("\t\tx\ty: 1", "y"),
        ("name: 管道 AR_n", "AR_n"),
        ("管道", "道"),
        ("e\u0301e\u0301 AR_n", "AR_n"),
        ("AR_n", "AR_n"),
    ],
)
def test_the_caret_is_under_the_mark(text: str, marked: str) -> None:
    _, line, caret = finding_text(finding(text, text.index(marked) + 1, len(marked))).plain.splitlines()
    start, stop = columns_of_caret(caret)
    assert start == cell_len(line[: line.index(marked)])
    assert stop - start == cell_len(marked)


@given(
    text=st.text(st.characters(exclude_categories=["Cs", "Zl", "Zp"]), min_size=1, max_size=600),
    column=st.integers(1, 700),
    length=st.integers(0, 700),
)
def test_any_line_gives_one_line_and_one_caret_line(text: str, column: int, length: int) -> None:
    lines = finding_text(finding(text, column, length)).plain.split("\n")
    if not text.strip():
        assert lines[1:] == [""]
        return
    _, line, caret, end = lines
    assert end == ""
    assert cell_len(line) <= MAX_LINE_COLUMNS + len("12345 | ......")
    start, stop = columns_of_caret(caret)
    assert start < stop <= cell_len(line) + 1
    assert not any(unicodedata.category(c) == "Cc" for c in line)


def test_a_mark_far_to_the_right_stays_in_sight() -> None:
    text = "x" * 5000 + " AR_n " + "y" * 5000
    _, line, caret = finding_text(finding(text, 5002, 4)).plain.splitlines()
    start, stop = columns_of_caret(caret)
    assert line[start:stop] == "AR_n"


def test_no_control_character_of_a_file_reaches_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x1b[31m\u202e"
    span = Span(f"{evil}.yaml", 1, 1, 1, f"x{evil}")
    violation = Violation("CP001", f"bad {evil}", span, hint=evil, related=(Related(evil, span),))
    text = report_text([FileReport(evil, (violation,)), FileReport(evil, problem=evil)]).plain
    assert not set(text.replace("\n", "")) & set(evil) - set("]0;title[31m")


@pytest.mark.parametrize(
    ("reports", "line"),
    [
        ([FileReport("a")], "no errors in 1 file"),
        ([FileReport("a", (finding("x", 1, 1),) * 2), FileReport("b")], "2 errors in 2 files"),
        (
            [FileReport("a", (finding("x", 1, 1), finding("x", 1, 1, severity=Severity.WARNING)))],
            "1 error, 1 warning in 1 file",
        ),
        ([FileReport("a", problem="gone"), FileReport("b")], "no errors in 2 files, 1 of them unreadable"),
        ([FileReport("a", problem="gone")], "1 file unreadable"),
    ],
)
def test_the_summary_line(reports: list[FileReport], line: str) -> None:
    assert summary_text(reports).plain == line + "\n"
    assert report_text(reports).plain.endswith(line + "\n")


def test_json_holds_what_the_text_holds() -> None:
    related = Related("here", Span("a.yaml", 3, 5, 4))
    violation = finding("text", 2, 3, hint="write AR_n", related=(related,))
    assert report_json([FileReport("a.yaml", (violation,)), FileReport("b.yaml", problem="gone")]) == {
        "version": 1,
        "files": [
            {
                "file": "a.yaml",
                "problem": None,
                "findings": [
                    {
                        "code": "CP201",
                        "severity": "error",
                        "message": "a message",
                        "file": "a.yaml",
                        "line": 7,
                        "column": 2,
                        "length": 3,
                        "hint": "write AR_n",
                        "related": [{"message": "here", "file": "a.yaml", "line": 3, "column": 5, "length": 4}],
                    }
                ],
            },
            {"file": "b.yaml", "problem": "gone", "findings": []},
        ],
        "summary": {"files": 2, "unreadable": 1, "errors": 1, "warnings": 0},
    }
