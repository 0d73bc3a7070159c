"""Findings as workflow commands of GitHub Actions: a line each, which GitHub shows beside the line of the schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from commplan.cli.render import FileReport, relative, summary_text, visible
from commplan.errors import Span, Violation


def report_github(reports: Sequence[FileReport], root: Path) -> str:
    """All findings, then the summary as a plain line.  Files below `root`, the top of the checkout, are named from there."""
    return "\n".join([*_commands(reports, root), summary_text(reports).plain.rstrip("\n")])


def _commands(reports: Sequence[FileReport], root: Path) -> Iterator[str]:
    for report in reports:
        if report.problem:
            yield f"::error title=commplan::{_data(visible(report.problem))}"
        for finding in report.findings:
            yield _command(finding, root)


def _command(finding: Violation, root: Path) -> str:
    span = finding.span
    properties = {
        "file": relative(span.file, root),
        "line": span.line,
        "col": span.column,
        "endColumn": span.column + span.length,
        "title": finding.code,
    }
    written = ",".join(f"{name}={_property(visible(str(value)))}" for name, value in properties.items())
    lines = [finding.message, *(f"{_place(related.span, root)}: {related.message}" for related in finding.related)]
    lines += [f"help: {finding.hint}"] * bool(finding.hint)
    return f"::{finding.severity.value} {written}::" + _data("\n".join(map(visible, lines)))


def _place(span: Span, root: Path) -> str:
    return f"{relative(span.file, root)}:{span.line}:{span.column}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
