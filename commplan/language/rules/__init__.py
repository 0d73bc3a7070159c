"""Documentation of the rules of the language, CP0xx: what `commplan explain` prints."""

from typing import Final

from commplan.errors import Rule
from commplan.language.rules.declarations import DECLARATION_RULES
from commplan.language.rules.file import FILE_RULES
from commplan.language.rules.lines import LINE_RULES

RULES: Final[tuple[Rule, ...]] = tuple(sorted((*FILE_RULES, *DECLARATION_RULES, *LINE_RULES), key=lambda rule: rule.code))

__all__ = ["RULES"]
