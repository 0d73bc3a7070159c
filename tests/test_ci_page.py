"""What docs/ci.md tells people to write and to run, taken from the page and run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from commplan.language import library
from commplan.language.modules import ModuleTable

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SET_BY_THE_READER = {"URL of your clone of commplan", "commit"}


def data(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


WORKFLOWS = [data(text) for language, text in BLOCKS if language == "yaml" and text.startswith("jobs:")]
STEPS = [step["run"] for workflow in WORKFLOWS for step in workflow["jobs"]["schedules"]["steps"] if "run" in step]
COMMANDS = [text for language, text in BLOCKS if not language and text.startswith("commplan ")]
COMMANDS += [step for step in STEPS if step.startswith("commplan ")]


@pytest.mark.parametrize("commands", COMMANDS)
def test_the_commands_run_as_they_are_written(tmp_path: Path, commands: str) -> None:
    (tmp_path / "schedules").mkdir()
    for name in ("mine.yaml", "schedules/mine.yaml"):
        shutil.copy(library.find("pipelined_allreduce"), tmp_path / name)
    (tmp_path / "table.json").write_text(ModuleTable.uniform(3).model_dump_json())
    script = f'commplan() {{ {sys.executable} -m commplan "$@"; }}\n{commands}'
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_there_are_commands_to_run() -> None:
    assert len(COMMANDS) >= 4
    assert len(WORKFLOWS) == 2


def test_what_the_reader_sets_has_one_name_everywhere() -> None:
    outside = re.sub(r"^(.*RS_|.*AR_).*$", "", "".join(text for _, text in BLOCKS), flags=re.MULTILINE)
    assert set(re.findall(r"<([^<>\n]*)>", outside)) == SET_BY_THE_READER
    for name in SET_BY_THE_READER:
        assert f"`<{name}>`" in PAGE


def test_without_torch_everything_else_is_installed() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {re.match(r"[\w.-]+", dependency)[0] for dependency in declared}  # type: ignore[index]
    installed = re.findall(r"pip install (?!-)(.*)$", PAGE, re.MULTILINE)
    assert len(installed) == 3
    assert all(set(line.split()) == names - {"torch"} for line in installed)


def test_the_hooks_of_pre_commit() -> None:
    ours, local = (data(text)["repos"][0] for language, text in BLOCKS if text.startswith("repos:"))
    (provided,) = data((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert ours["hooks"][0]["id"] == provided["id"]
    assert local["hooks"][0]["entry"] == provided["entry"]
