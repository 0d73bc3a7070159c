"""Findings for a person (text, with colours on a terminal) and for a program (JSON)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from commplan.errors import Severity, Span, Violation

TAB_COLUMNS: Final = 4
MAX_LINE_COLUMNS: Final = 160
REPORT_VERSION: Final = 1

_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow"}


@dataclass(frozen=True, slots=True)
class FileReport:
    """What came of one file: its findings, or (`problem`) why it could not be read; `note` is what they hold for."""

    file: str
    findings: tuple[Violation, ...] = ()
    problem: str = ""
    note: str = ""

    def count(self, severity: Severity) -> int:
        """How many findings are of one severity."""
        return sum(finding.severity is severity for finding in self.findings)


def console(stderr: bool = False) -> Console:
    """Where text goes: colours on a terminal only and not under NO_COLOR, lines never wrapped."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False, markup=False)


def report_text(reports: Sequence[FileReport]) -> Text:
    """All findings, file after file, and the summary line."""
    out = Text()
    for report in reports:
        if report.problem:
            out.append("error: ", "bold red").append(f"{visible(report.problem)}\n")
        for finding in report.findings:
            out.append_text(finding_text(finding)).append("\n")
        if report.note:
            out.append("note: ", "cyan").append(f"{visible(report.file)}: {visible(report.note)}\n")
    return out.append_text(summary_text(reports))


def finding_text(finding: Violation) -> Text:
    """One finding: place, code and message, then the line with a caret, related places and what to write instead."""
    style = _STYLES[finding.severity]
    out = Text.assemble((f"{visible(str(finding.span))}: ", "bold"), (finding.code, style), f" {visible(finding.message)}")
    if finding.severity is not Severity.ERROR:
        out.append(f" ({finding.severity.value})")
    out.append("\n").append_text(_excerpt(finding.span, style))
    for related in finding.related:
        out.append("  note: ", "cyan").append(f"{visible(str(related.span))}: {visible(related.message)}\n")
        out.append_text(_excerpt(related.span, "cyan"))
    if finding.hint:
        out.append("  help: ", "green").append(f"{visible(finding.hint)}\n")
    return out


def summary_text(reports: Sequence[FileReport]) -> Text:
    """The last line: `2 errors, 1 warning in 3 files`."""
    errors, warnings = _count(reports, Severity.ERROR), _count(reports, Severity.WARNING)
    unreadable = sum(bool(report.problem) for report in reports)
    counts = [_plural(errors, "error")] * bool(errors) + [_plural(warnings, "warning")] * bool(warnings)
    text = f"{', '.join(counts) or 'no errors'} in {_plural(len(reports), 'file')}"
    if unreadable and unreadable == len(reports):
        text = f"{_plural(unreadable, 'file')} unreadable"
    elif unreadable:
        text += f", {unreadable} of them unreadable"
    return Text(text + "\n", "bold red" if errors or unreadable else "bold yellow" if warnings else "bold green")


def report_json(reports: Sequence[FileReport]) -> dict[str, Any]:
    """The same as plain data.

    Lines and columns count from 1, columns and lengths in characters.  `problem` is null unless the file could not be read.
    New keys may be added; a change of any other kind raises `version`.
    """
    return {
        "version": REPORT_VERSION,
        "files": [
            {
                "file": report.file,
                "problem": report.problem or None,
                "findings": [_finding_json(finding) for finding in report.findings],
            }
            for report in reports
        ],
        "summary": {
            "files": len(reports),
            "unreadable": sum(bool(report.problem) for report in reports),
            "errors": _count(reports, Severity.ERROR),
            "warnings": _count(reports, Severity.WARNING),
        },
    }


def relative(file: str, root: Path) -> str:
    """The name of a file as seen from `root`; as it is where the file does not lie below."""
    path = Path(os.path.normpath(root / file))
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def visible(text: str) -> str:
    """`text` with line ends and tabs as spaces and other control characters, which a terminal would obey, as U+FFFD."""
    return "".join(" " if c in "\t\r\n" else c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _excerpt(span: Span, style: str) -> Text:
    """The line of `span` and a caret line below it; nothing where the line is not known."""
    if not span.text.strip():
        return Text()
    # One string a character, so that what the caret skips is as wide as what stands above it.
    cells = [" " * TAB_COLUMNS if c == "\t" else visible(c) for c in span.text]
    start = min(span.column - 1, len(cells))
    stop = max(start + 1, min(start + span.length, len(cells)))
    first = _first_shown(cells, start, stop)
    last = _last_shown(cells, first)
    shown_stop = min(stop, last)
    head, marked, tail = ("".join(cells[a:b]) for a, b in ((first, start), (start, shown_stop), (shown_stop, last)))
    before, after = "..." if first else "", "..." if last < len(cells) else ""
    line = Text.assemble((f"{span.line:>5} | ", "dim"), before, head, (marked, style), tail, after, "\n")
    indent = " " * cell_len(before + head)
    return line.append("      | ", "dim").append(indent).append("^" * max(1, cell_len(marked)), style).append("\n")


def _first_shown(cells: Sequence[str], start: int, stop: int) -> int:
    """Where to begin showing a line so that what is marked (its start, if it is very long) stays in sight."""
    if cell_len("".join(cells[:stop])) <= MAX_LINE_COLUMNS:
        return 0
    first = start
    while first > 0 and cell_len("".join(cells[first - 1 : start])) <= MAX_LINE_COLUMNS // 4:
        first -= 1
    return first


def _last_shown(cells: Sequence[str], first: int) -> int:
    """One past the last character that fits when a line is shown from `first` on."""
    last, columns = first, 0
    while last < len(cells) and columns + cell_len(cells[last]) <= MAX_LINE_COLUMNS:
        columns += cell_len(cells[last])
        last += 1
    return last


def _finding_json(finding: Violation) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity.value,
        "message": finding.message,
        **_span_json(finding.span),
        "hint": finding.hint or None,
        "related": [{"message": related.message, **_span_json(related.span)} for related in finding.related],
    }


def _span_json(span: Span) -> dict[str, Any]:
    return {"file": span.file, "line": span.line, "column": span.column, "length": span.length}


def _count(reports: Iterable[FileReport], severity: Severity) -> int:
    return sum(report.count(severity) for report in reports)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
