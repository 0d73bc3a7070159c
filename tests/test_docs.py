"""Every schedule that the documents show is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import commplan
from commplan import cli, language
from commplan.errors import Severity

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = [path for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))) if path.exists()]


def blocks(document: Path) -> list[str]:
    """The YAML blocks of a document that are whole files."""
    found = re.findall(r"^```yaml\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for block in found if block.startswith("version:")]


def schedules(document: Path) -> list[str]:
    """Those that are schedules, not profiles."""
    return [block for block in blocks(document) if "compute_s:" not in block]


SCHEDULES = [
    pytest.param(text, id=f"{document.stem}-{number}")
    for document in DOCUMENTS
    for number, text in enumerate(schedules(document), start=1)
]


def test_there_are_schedules_to_check() -> None:
    assert len(SCHEDULES) >= 5


@pytest.mark.parametrize("text", SCHEDULES)
def test_shown_schedule_is_valid(text: str) -> None:
    assert [str(found) for found in commplan.check(text) if found.severity is Severity.ERROR] == []


def test_the_shown_predictions_are_what_the_shown_profile_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "docs" / "simulate.md").read_text(encoding="utf-8")
    (profile,) = blocks(REPOSITORY / "docs" / "simulate.md")
    (tmp_path / "two_hosts.yaml").write_text(profile, encoding="utf-8")
    found = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for command, shown in zip(found[::2], found[1::2], strict=True):
        with pytest.raises(SystemExit) as end:
            cli.main(command.replace("two_hosts.yaml", str(tmp_path / "two_hosts.yaml")).split()[1:])
        assert end.value.code in (0, None)
        assert capsys.readouterr().out == shown


def test_the_shown_schedule_is_what_tuning_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (profile,) = blocks(REPOSITORY / "docs" / "simulate.md")
    (shown,) = blocks(REPOSITORY / "docs" / "tune.md")
    monkeypatch.chdir(tmp_path)
    Path("two_hosts.yaml").write_text(profile, encoding="utf-8")
    document = (REPOSITORY / "docs" / "tune.md").read_text(encoding="utf-8")
    command = re.findall(r"^commplan tune .*$", document, re.MULTILINE)[0].split()[1:]
    with pytest.raises(SystemExit):
        cli.main(command)
    assert Path("mine.yaml").read_text(encoding="utf-8") == shown
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("MiB")]
    rows = rows[: rows.index(next(row for row in rows if row.startswith("blocking"))) + 1]
    assert all(row in document for row in rows)
    Path("mine.yaml").unlink()
    with pytest.raises(SystemExit):
        cli.main(command[: command.index("--memory-cap")])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "--memory-cap" in line]
    assert row in document


def test_the_shown_module_table_is_one_and_names_every_key() -> None:
    (text,) = re.findall(
        r"^```json\n(.*?)^```$", (REPOSITORY / "docs" / "language.md").read_text(encoding="utf-8"), re.M | re.S
    )
    table = language.parse_table(text)
    first, second = json.loads(text)["modules"]
    assert first.keys() | second.keys() == type(table.modules[0]).model_fields.keys()
    assert first["parameters"][0].keys() == type(table.modules[0].parameters[0]).model_fields.keys()


@pytest.mark.parametrize(("number", "name"), [(0, "pipelined_allreduce"), (1, "bucketed_pipeline_depth2"), (2, "fsdp2_native")])
@pytest.mark.parametrize("num_modules", [1, 2, 7])
def test_shown_pipeline_is_the_one_of_the_library(number: int, name: str, num_modules: int) -> None:
    shown = schedules(REPOSITORY / "docs" / "from_fsdp_code_to_schedule.md")[number]
    assert commplan.compile(shown, num_modules).hooks == commplan.compile(name, num_modules).hooks
