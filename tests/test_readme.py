"""What README.md and docs/ say is there: links, commands, programs, library, and the code that they show."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import commplan
from commplan.language import library

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
DOCUMENTS = (README, *sorted((REPOSITORY / "docs").glob("*.md")))
TORCH_SIDE = {"attach", "describe"}


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The fragments by which a page's headings are reached."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKS = [
    pytest.param(document, target, id=f"{document.stem}-{target}")
    for document in DOCUMENTS
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    if not target.startswith("https://")
]


@pytest.mark.parametrize(("document", "target"), LINKS)
def test_link_leads_somewhere(document: Path, target: str) -> None:
    path, _, fragment = target.partition("#")
    page = (document.parent / path).resolve() if path else document
    assert page.exists()
    assert page.is_relative_to(REPOSITORY)
    assert not fragment or fragment in anchors(page)


def test_every_document_is_linked() -> None:
    text = README.read_text(encoding="utf-8")
    assert [path.name for path in DOCUMENTS[1:] if f"(docs/{path.name})" not in text] == []


def test_the_schedule_is_clean_and_the_one_of_the_library() -> None:
    (shown,) = blocks(README, "yaml")
    assert commplan.check(shown) == ()
    assert commplan.compile(shown, 5).hooks == commplan.compile("pipelined_allreduce", 5).hooks


def test_the_training_script_is_python_that_calls_what_exists() -> None:
    (shown,) = blocks(README, "python")
    tree = ast.parse(shown)
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("commplan.")]
    (call,) = used
    assert ast.unparse(call.func).removeprefix("commplan.") in set(commplan.__all__)
    assert isinstance(call.args[1], ast.Constant)
    assert call.args[1].value in library.names()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_shown_python_parses_and_names_what_commplan_has(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for shown in blocks(document, "python"):
        ast.parse(shown)
    named = set(re.findall(r"`?commplan\.([a-zA-Z]+)\(", text))
    assert named <= set(commplan.__all__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_named_programs_and_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:commplan|docs|examples|schedules|tests|tools)/[\w./]*\w", text))
    missing = {path for path in named if not (REPOSITORY / path).exists()}
    assert missing == set()


def test_named_commands_exist() -> None:
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    code = "\n".join(
        part for text in texts for part in re.findall(r"^```\n.*?^```$|`commplan [^`]+`", text, re.DOTALL | re.MULTILINE)
    )
    named = set(re.findall(r"(?:^|`)commplan ([a-z]+)", code, re.MULTILINE))
    assert {"list", "check", "plan", "explain"} <= named
    for command in sorted(named):
        help_of = [sys.executable, "-m", "commplan", command, "--help"]
        done = subprocess.run(help_of, cwd=REPOSITORY, capture_output=True, check=False)
        assert done.returncode == 0, command


def test_named_number_of_schedules() -> None:
    words = {15: "fifteen", 16: "sixteen", 17: "seventeen", 18: "eighteen", 19: "nineteen", 20: "twenty"}
    assert f"The library in `schedules/` has {words[len(library.names())]}" in README.read_text(encoding="utf-8")


def test_the_picture_is_svg_for_both_themes() -> None:
    text = (REPOSITORY / "docs" / "overlap.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme:dark" in text
    words = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {"compute", "shard", "replicate"} <= words
    assert any("sleep" in str(word) for word in words)
