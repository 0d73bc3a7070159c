"""`commplan new` and `commplan schema`, and the hook for pre-commit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

import commplan
from commplan.language import library, load
from tests.cli.running import Run

ROOT = Path(__file__).parents[2]


def test_a_new_schedule_is_clean_and_explains_itself(run: Run) -> None:
    result = run("new", "mine")
    assert (result.code, result.out) == (0, "wrote mine.yaml; next: commplan check mine.yaml\n")
    text = Path("mine.yaml").read_text(encoding="utf-8")
    assert commplan.check(Path("mine.yaml")) == ()
    assert load("mine.yaml").name == "mine"
    assert text.count("#") > 10
    assert max(map(len, text.splitlines())) <= 128


def test_what_a_new_schedule_proposes_in_comments_works(run: Run) -> None:
    run("new", "mine")
    text = Path("mine.yaml").read_text(encoding="utf-8")
    proposed = re.sub(r"^# (params|lanes):$", r"\1:", re.sub(r"^#(   \w+: \{)", r"\1", text, flags=re.M), flags=re.M)
    proposed = proposed.replace("AR_n: {after: RS_n}", "AR_<n-k>: {after: RS_<n-k>, lane: outer}")
    assert proposed.count("\nparams:") == proposed.count("\nlanes:") == 1
    assert commplan.check(proposed) == ()


@pytest.mark.parametrize("name", library.names())
def test_a_copy_of_the_library_is_the_same_under_another_name(run: Run, name: str) -> None:
    assert run("new", "my-copy_2.yaml", "--from", name).code == 0
    made = load("my-copy_2.yaml")
    assert made.name == "my-copy_2"
    assert [found.code for found in commplan.check(made)] == [found.code for found in commplan.check(name)]
    assert commplan.compile(made, 5).hooks == commplan.compile(name, 5).hooks
    original = library.find(name).read_text(encoding="utf-8")
    assert Path("my-copy_2.yaml").read_text(encoding="utf-8").split("\n")[1:] == (
        original.replace(f"name: {name}\n", "name: my-copy_2\n").split("\n")
    )


@pytest.mark.parametrize("written", ['"quoted: yes"', "'it''s'", "plain # comment", "é ü"])
def test_a_copy_of_a_file(run: Run, written: str) -> None:
    Path("from.yaml").write_text(f"version: 1\nname: {written}\npost_backward: [RS_n]\n", encoding="utf-8")
    assert run("new", "copy", "--from", "from.yaml").code == 0
    assert load("copy.yaml").name == "copy"


def test_a_new_schedule_names_the_schema_that_lies_beside_it(run: Run) -> None:
    Path("schedule.schema.json").write_text(run("schema").out)
    modeline = "# yaml-language-server: $schema=schedule.schema.json"
    run("new", "mine")
    run("new", "copy", "--from", "mine.yaml")
    for name in ("mine", "copy"):
        assert Path(f"{name}.yaml").read_text().count(modeline) == 1
        assert load(f"{name}.yaml").name == name
    assert Path("mine.yaml").read_text().startswith(f"{modeline}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("mine",), 2, "mine.yaml exists already"),
        (("dangling",), 2, "dangling.yaml exists already"),
        (("blocking",), 2, "the library has a schedule blocking"),
        (("a/b",), 2, "a name has letters"),
        (("../x",), 2, "a name has letters"),
        (("",), 2, "a name has letters"),
        (("-x",), 2, "-x"),
        (("x" * 101,), 2, "a name has letters"),
        (("true",), 2, "true is no text in YAML"),
        (("other", "--from", "blokcing"), 2, "did you mean blocking?"),
        (("other", "--from", "missing.yaml"), 2, "cannot read 'missing.yaml'"),
        (("other", "--from", "bad.yaml"), 1, "bad.yaml:3:"),
        (("other", "--from", "folded.yaml"), 2, "write it on one line"),
    ],
)
def test_nothing_is_written_where_it_cannot_be_right(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    Path("mine.yaml").write_text("mine")
    Path("dangling.yaml").symlink_to("nowhere")
    Path("bad.yaml").write_text("version: 1\nname: bad\npost_backward: [R_n]\n")
    Path("folded.yaml").write_text("version: 1\nname: >-\n  on its own\n  lines\npost_backward: [RS_n]\n")
    before = {path.name for path in Path().iterdir()}
    result = run("new", *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert {path.name for path in Path().iterdir()} == before
    assert Path("mine.yaml").read_text() == "mine"


def test_a_folder_that_takes_no_files_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    result = run("new", "mine")
    assert (result.code, result.err) == (2, "commplan: No space left on device\n")


def test_the_schema_is_printed(run: Run) -> None:
    result = run("schema")
    assert result.code == 0
    schema = json.loads(result.out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)
    data = YAML(typ="safe", pure=True).load(library.find("windowed_allreduce").read_text(encoding="utf-8"))
    Draft202012Validator(schema).validate(data)


def test_the_hook_for_pre_commit() -> None:
    (hook,) = YAML(typ="safe", pure=True).load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"]) == ("commplan-check", "python")
    files = re.compile(hook["files"])
    schedules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "schedules").iterdir()]
    assert all(files.search(path) for path in (*schedules, "a/schedules/b.yml", "x/y.schedule.yaml"))
    assert not any(files.search(path) for path in ("ci.yaml", "schedules.yaml", "schedules/readme.md", "my_schedules/x.yaml"))
    assert hook["entry"].split()[0] == "commplan"
    command = [sys.executable, "-m", *hook["entry"].split(), *schedules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
