"""Writes docs/rules.md: every rule with its explanation, a wrong and a right schedule. `--check` only says whether it is so."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from commplan.compiler import RULES
from commplan.errors import Rule

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "rules.md"
COLUMNS: Final = 128

HEAD: Final = """\
# Rules

What `commplan check` looks for, generated from the rules by `tools/rules_doc`. `commplan explain CODE` prints the same.

An error stops a schedule from being used. A warning does not; `commplan check --strict` fails on it. Warnings on time and
memory are given only of schedules that are right, for params at their default, and only where the other way surely gains. Of
the library, `blocking` alone has any: it is there to overlap nothing.

Comments at the top of an example say what it is checked with: a number of modules, or modules by name with their mesh axes and
the shapes of their parameters (`--modules`), one such line for each rank (`--modules` several times), a cap (`--memory-cap`).
"""

FAMILIES: Final = {
    "CP0": "The file",
    "CP1": "Order",
    "CP2": "Data flow",
    "CP3": "Ranks, communicators and the mesh",
    "CP4": "Memory",
    "CP5": "Hints",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for prefix, title in FAMILIES.items():
        rules = [rule for code, rule in RULES.items() if code.startswith(prefix)]
        table = ["| code | about | severity |", "|---|---|---|", *(_row(rule) for rule in rules)]
        parts.append("\n".join([f"## {title}", "", *table, ""]))
        parts.extend("\n".join(_entry(rule)) for rule in rules)
    return "\n".join(parts)


def _row(rule: Rule) -> str:
    return f"| [{rule.code}](#{rule.code.lower()}) | {rule.title} | {rule.severity} |"


def _entry(rule: Rule) -> Iterator[str]:
    yield f"### {rule.code}\n"
    for paragraph in (f"**{rule.title}** ({rule.severity}). {rule.what}", rule.why):
        yield textwrap.fill(paragraph, COLUMNS, break_long_words=False, break_on_hyphens=False) + "\n"
    for heading, schedule in (("Wrong", rule.wrong), ("Right", rule.right)):
        # A wrong schedule may hold what a page cannot.
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in schedule)
        fence = "```" if "```" not in shown else "````"
        yield f"{heading}:\n\n{fence}\n{shown.strip(chr(10))}\n{fence}\n"


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` compare; 1 if it is out of step, 2 on wrong usage."""
    if arguments not in ([], ["--check"]):
        print("usage: tools/rules_doc [--check]", file=sys.stderr)
        return 2
    text = page()
    if not arguments:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print("docs/rules.md is not what the rules say: run tools/rules_doc", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
