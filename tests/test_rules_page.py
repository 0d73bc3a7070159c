"""docs/rules.md is what the rules say, and every rule shows both sides."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from commplan import compiler
from commplan.errors import Rule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import rules_page

from tests import given

REPOSITORY = Path(__file__).resolve().parents[1]
RULES = list(compiler.RULES.values())


def test_the_page_is_in_step() -> None:
    assert rules_page.PAGE == REPOSITORY / "docs" / "rules.md"
    assert rules_page.main(["--check"]) == 0, "run tools/rules_doc"


def test_a_page_out_of_step_and_wrong_usage_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_page, "PAGE", tmp_path / "rules.md")
    assert rules_page.main(["--check"]) == 1
    assert rules_page.main([]) == 0
    assert rules_page.main(["--check"]) == 0
    (tmp_path / "rules.md").write_text("# Rules\n")
    assert rules_page.main(["--check"]) == 1
    assert rules_page.main(["--frobnicate"]) == 2


def test_every_rule_is_on_the_page_once() -> None:
    assert re.findall(r"^### (CP\d{3})$", rules_page.page(), re.MULTILINE) == sorted(compiler.RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_nothing_is_found_in_what_a_rule_shows_as_right(rule: Rule) -> None:
    assert given.findings(rule.right) == ()
