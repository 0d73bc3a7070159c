"""Findings as SARIF 2.1.0, which code scanning services and editors read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, Final
from urllib.parse import quote

import commplan
from commplan import compiler
from commplan.cli.render import FileReport, relative
from commplan.errors import Related, Rule, Span, Violation

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
SOURCE_ROOT: Final = "%SRCROOT%"


def report_sarif(reports: Sequence[FileReport], root: Path) -> dict[str, Any]:
    """One run, with every rule.  Files below `root`, the top of the checkout, are named from there.

    Lines and columns count from 1, columns in characters; the end column is the one after the last.  A file that could not
    be read is a notification, and the run then no success.
    """
    codes = {code: number for number, code in enumerate(compiler.RULES)}
    problems = [report for report in reports if report.problem]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "commplan",
                        "version": commplan.__version__,
                        "rules": [_rule(rule) for rule in compiler.RULES.values()],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {
                        "executionSuccessful": not problems,
                        "toolExecutionNotifications": [
                            {"level": "error", "message": {"text": report.problem}} for report in problems
                        ],
                    }
                ],
                "results": [_result(finding, codes, root) for report in reports for finding in report.findings],
            }
        ],
    }


def _rule(rule: Rule) -> dict[str, Any]:
    wrong, right = rule.wrong.strip("\n"), rule.right.strip("\n")
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.what},
        "help": {
            "text": f"{rule.what}\n\n{rule.why}\n\nWrong:\n\n{wrong}\n\nRight:\n\n{right}\n",
            "markdown": f"{rule.what}\n\n{rule.why}\n\nWrong:\n\n```yaml\n{wrong}\n```\n\nRight:\n\n```yaml\n{right}\n```\n",
        },
        "defaultConfiguration": {"level": rule.severity.value},
    }


def _result(finding: Violation, codes: dict[str, int], root: Path) -> dict[str, Any]:
    hint = f" ({finding.hint})" if finding.hint else ""
    result = {
        "ruleId": finding.code,
        "ruleIndex": codes[finding.code],
        "level": finding.severity.value,
        "message": {"text": finding.message + hint},
        "locations": [{"physicalLocation": _physical(finding.span, root)}],
    }
    if finding.related:
        result["relatedLocations"] = [_related(number, related, root) for number, related in enumerate(finding.related)]
    return result


def _related(number: int, related: Related, root: Path) -> dict[str, Any]:
    return {"id": number, "message": {"text": related.message}, "physicalLocation": _physical(related.span, root)}


def _physical(span: Span, root: Path) -> dict[str, Any]:
    region: dict[str, Any] = {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.line,
        "endColumn": span.column + span.length,
    }
    return {"artifactLocation": _artifact(span.file, root), "region": region}


def _artifact(file: str, root: Path) -> dict[str, str]:
    """The URI of a file: below `root` a relative one."""
    name = relative(file, root)
    if PurePath(name).is_absolute():
        return {"uri": PurePath(name).as_uri()}
    return {"uri": quote(os.fsencode(PurePath(name).as_posix())), "uriBaseId": SOURCE_ROOT}
