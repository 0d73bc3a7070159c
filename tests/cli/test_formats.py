"""Findings as SARIF and as annotations: well formed, complete, and at the same places as the text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from commplan import cli, compiler
from commplan.cli.github import report_github
from commplan.cli.render import FileReport
from commplan.cli.sarif import report_sarif
from commplan.errors import Related, Severity, Span, Violation

CASES = Path(__file__).parents[1] / "cases"
HERE = Path("/work tree")

# What SARIF 2.1.0 demands of the objects that are written here.
TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
COUNT = {"type": "integer", "minimum": 1}
PLACE = {
    "type": "object",
    "required": ["artifactLocation", "region"],
    "additionalProperties": False,
    "properties": {
        "artifactLocation": {
            "required": ["uri"],
            "additionalProperties": False,
            "properties": {"uri": {"type": "string", "format": "uri-reference"}, "uriBaseId": {"const": "%SRCROOT%"}},
        },
        "region": {
            "required": ["startLine"],
            "additionalProperties": False,
            "properties": dict.fromkeys(("startLine", "startColumn", "endLine", "endColumn"), COUNT),
        },
    },
}
RULE = {
    "required": ["id"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "shortDescription": TEXT,
        "fullDescription": TEXT,
        "help": {**TEXT, "properties": {"text": {"type": "string"}, "markdown": {"type": "string"}}},
        "defaultConfiguration": {"additionalProperties": False, "properties": {"level": LEVEL}},
    },
}
RESULT = {
    "required": ["message"],
    "additionalProperties": False,
    "properties": {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": LEVEL,
        "message": TEXT,
        "locations": {"type": "array", "minItems": 1, "items": {"properties": {"physicalLocation": PLACE}}},
        "relatedLocations": {
            "type": "array",
            "uniqueItems": True,
            "items": {
                "properties": {"id": {"type": "integer", "minimum": 0}, "message": TEXT, "physicalLocation": PLACE},
                "additionalProperties": False,
            },
        },
    },
}
RUN = {
    "required": ["tool"],
    "additionalProperties": False,
    "properties": {
        "tool": {
            "required": ["driver"],
            "properties": {
                "driver": {
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string"},
                        "version": {"type": "string"},
                        "rules": {"type": "array", "uniqueItems": True, "items": RULE},
                    },
                }
            },
        },
        "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
        "invocations": {
            "type": "array",
            "items": {
                "required": ["executionSuccessful"],
                "additionalProperties": False,
                "properties": {
                    "executionSuccessful": {"type": "boolean"},
                    "toolExecutionNotifications": {
                        "type": "array",
                        "items": {"required": ["message"], "properties": {"message": TEXT, "level": LEVEL}},
                    },
                },
            },
        },
        "results": {"type": "array", "items": RESULT},
    },
}
LOG = Draft7Validator(
    {
        "type": "object",
        "required": ["version", "runs"],
        "additionalProperties": False,
        "properties": {"$schema": {"type": "string"}, "version": {"const": "2.1.0"}, "runs": {"type": "array", "items": RUN}},
    }
)


def reports_of(folder: Path) -> list[FileReport]:
    return [FileReport(str(path), compiler.check(path)) for path in sorted(folder.glob("*.yaml"))]


REPORTS = [*reports_of(CASES / "err"), FileReport("gone.yaml", problem="cannot read 'gone.yaml': No such file")]


def finding(**changes: Any) -> Violation:
    fields = {"code": "CP201", "message": "a message", "span": Span("a.yaml", 7, 5, 4, "  - AR_n")} | changes
    return Violation(**fields)


# SARIF


def test_a_log_has_the_structure_of_sarif() -> None:
    log = report_sarif(REPORTS, CASES.parent)
    assert [f"{error.json_path}: {error.message}" for error in LOG.iter_errors(log)] == []
    assert json.loads(json.dumps(log)) == log


def test_a_log_has_every_rule_with_help() -> None:
    (run,) = report_sarif([], HERE)["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(compiler.RULES)
    for rule in rules:
        doc = compiler.RULES[rule["id"]]
        assert rule["defaultConfiguration"]["level"] == doc.severity
        for form in ("text", "markdown"):
            for part in (doc.what, doc.why, doc.wrong.strip("\n"), doc.right.strip("\n")):
                assert part in rule["help"][form]


def test_a_log_has_every_finding_at_its_place() -> None:
    (run,) = report_sarif(REPORTS, CASES.parent)["runs"]
    findings = [finding for report in REPORTS for finding in report.findings]
    assert len(run["results"]) == len(findings) > 50
    for result, found in zip(run["results"], findings, strict=True):
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == found.code
        assert result["level"] == found.severity
        assert result["message"]["text"].startswith(found.message)
        places = [result["locations"][0], *result.get("relatedLocations", ())]
        for place, span in zip(places, [found.span, *(related.span for related in found.related)], strict=True):
            physical = place["physicalLocation"]
            region = physical["region"]
            assert CASES.parent / unquote(physical["artifactLocation"]["uri"]) == Path(span.file)
            assert (region["startLine"], region["endLine"]) == (span.line, span.line)
            assert (region["startColumn"], region["endColumn"]) == (span.column, span.column + span.length)
            if span.text:
                assert region["endColumn"] <= max(len(span.text), 1) + 1


@pytest.mark.parametrize(("problem", "successful"), [("", True), ("cannot read 'a.yaml'", False)])
def test_a_file_that_cannot_be_read_is_no_successful_run(problem: str, successful: bool) -> None:
    (run,) = report_sarif([FileReport("a.yaml", problem=problem)], HERE)["runs"]
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is successful
    assert [note["message"]["text"] for note in invocation["toolExecutionNotifications"]] == [problem] * bool(problem)


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("a.yaml", "a.yaml"),
        ("./x/../b c.yaml", "b%20c.yaml"),
        ("/work tree/sub/ä#.yaml", "sub/%C3%A4%23.yaml"),
        ("../out.yaml", "file:///out.yaml"),
        ("/else where/c.yaml", "file:///else%20where/c.yaml"),
        ("a\udcff.yaml", "a%FF.yaml"),
    ],
)
def test_files_are_named_from_the_top(file: str, uri: str) -> None:
    (run,) = report_sarif([FileReport(file, (finding(span=Span(file, 1, 1)),))], HERE)["runs"]
    artifact = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact["uri"] == uri
    assert ("uriBaseId" in artifact) == (not urlparse(uri).scheme)


# GitHub Actions

COMMAND = re.compile(r"::(?P<level>error|warning)(?: (?P<properties>[^:]*))?::(?P<data>.*)")
DECODED = (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%"))


def decoded(text: str) -> str:
    """As the runner of GitHub Actions reads it."""
    for written, meant in DECODED:
        text = text.replace(written, meant)
    return text


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    found = []
    for line in text.split("\n")[:-1]:
        match = COMMAND.fullmatch(line)
        assert match is not None, line
        pairs = (pair.split("=", 1) for pair in (match["properties"] or "").split(","))
        found.append((match["level"], {name: decoded(value) for name, value in pairs}, decoded(match["data"])))
    return found


def test_an_annotation_with_everything() -> None:
    related = Related("RS_n is issued here", Span("a.yaml", 3, 5, 4))
    report = FileReport("a.yaml", (finding(message="50% of it", hint="write AR_n, or nothing", related=(related,)),))
    assert report_github([report], HERE).split("\n") == [
        "::error file=a.yaml,line=7,col=5,endColumn=9,title=CP201::"
        "50%25 of it%0Aa.yaml:3:5: RS_n is issued here%0Ahelp: write AR_n, or nothing",
        "1 error in 1 file",
    ]


def test_every_finding_is_an_annotation() -> None:
    found = commands(report_github(REPORTS, CASES.parent))
    findings = [finding for report in REPORTS for finding in report.findings]
    assert len(found) == len(findings) + 1
    for (level, properties, data), violation in zip(found, findings, strict=False):
        span = violation.span
        assert level == violation.severity
        assert CASES.parent / properties.pop("file") == Path(span.file)
        assert properties == {
            "line": str(span.line),
            "col": str(span.column),
            "endColumn": str(span.column + span.length),
            "title": violation.code,
        }
        assert data.startswith(violation.message)
    assert found[-1] == ("error", {"title": "commplan"}, REPORTS[-1].problem)


@given(st.text(min_size=1), st.text(min_size=1).filter(lambda name: "\0" not in name))
def test_nothing_in_a_schedule_ends_or_begins_a_command(text: str, name: str) -> None:
    span = Span(f"/top/{name}/x", 1, 1)
    violation = finding(message=text, hint=text, span=span, related=(Related(text, span),))
    warning = finding(message=text, severity=Severity.WARNING, span=span)
    text = report_github([FileReport(name, (violation, warning)), FileReport(name, problem=text)], HERE)
    assert not {"\r", "\v", "\f", "\x85", "\u2028", "\x1b"} & set(text)
    assert [level for level, _, _ in commands(text)] == ["error", "warning", "error"]


# As a user gets them


@pytest.mark.parametrize(("name", "code"), [("eager_apply", 0), (str(CASES / "err" / "cycle.yaml"), 1), ("gone.yaml", 2)])
@pytest.mark.parametrize("form", ["sarif", "github", "json"])
def test_formats_have_the_exit_codes_of_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str, name: str, code: int
) -> None:
    monkeypatch.chdir(CASES)
    with pytest.raises(SystemExit) as end:
        cli.main(["check", name, "--format", form])
    out, err = capsys.readouterr()
    assert (int(end.value.code or 0), err) == (code, "")
    if form == "sarif":
        LOG.validate(json.loads(out))
        assert ("err/cycle.yaml" in out) == (code == 1)
    elif form == "github":
        assert out.count("\n") == (1 if code == 0 else len(commands(out.rstrip("\n"))) + 1)
