"""The documentation of the rules holds, and is whole."""

import re
from pathlib import Path

import pytest

from commplan.errors import Rule
from commplan.language import RULES, examine

REPO = Path(__file__).parents[2]
BY_CODE = {rule.code: rule for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_wrong_breaks_the_rule_and_right_breaks_none(rule: Rule) -> None:
    spec, found = examine(rule.wrong)
    assert {(v.code, v.severity) for v in found} == {(rule.code, rule.severity)}
    spec, found = examine(rule.right)
    assert spec is not None
    assert found == ()


def test_codes_are_in_order_and_used_once() -> None:
    codes = [rule.code for rule in RULES]
    assert codes == sorted(set(codes))
    assert all(re.fullmatch(r"CP0\d\d", code) for code in codes)


def test_every_code_in_use_is_documented() -> None:
    sources = [p for p in (REPO / "commplan/language").rglob("*.py") if "rules" not in p.parts]
    used = {code for path in sources for code in re.findall(r'"(CP\d{3})"', path.read_text(encoding="utf-8"))}
    assert used == set(BY_CODE)


def test_every_rule_is_listed_in_the_docs() -> None:
    listed = re.findall(r"^\| (CP0\d\d) \| (.+?) \|", (REPO / "docs/language.md").read_text(encoding="utf-8"), re.M)
    assert listed == [(rule.code, rule.title) for rule in RULES]


def test_every_schedule_in_the_docs_is_right() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (REPO / "docs/language.md").read_text(encoding="utf-8"), re.S)
    whole = [block for block in blocks if block.startswith("version:")]
    assert len(whole) >= 5
    for block in whole:
        assert examine(block)[1] == (), block
