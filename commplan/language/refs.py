"""How a schedule names ops: `AR_<n-1>` is the family `AR` at the index `<n-1>`."""

from __future__ import annotations

import re
from typing import Final

from commplan.errors import CommplanError, Span
from commplan.language.source import shown
from commplan.language.spec import Index, Number, OpRef
from commplan.ops import FAMILY_PATTERN, KIND_OF_FAMILY

NAME_PATTERN: Final = r"[A-Za-z][A-Za-z0-9_]*"
"""Names of params and lanes."""

MAX_DIGITS: Final = 19

MAX_OFFSET: Final = 1024
"""Beyond it a schedule means the same as with less."""

_INDEX: Final = re.compile(rf"(?P<every>\*)|n|<n(?:(?P<sign>[+-])(?:(?P<value>0|[1-9][0-9]*)|(?P<param>{NAME_PATTERN})))?>")
_REF: Final = re.compile(rf"(?P<family>{FAMILY_PATTERN})_(?P<index>n|\*|<.*>)")
OP_FORMS: Final = "an op is written RS_n, RS_<n-1>, RS_<n+1> or RS_<n-k> with k from `params`; RS_* in `after` and `wait`"

WAIT_FORM: Final = "a wait is written `- wait: RS_<n-1>`"

# What people write instead of an index: no brackets, other brackets, blanks, another letter, no underscore.
_LOOSE: Final = re.compile(
    rf"(?P<family>{FAMILY_PATTERN}?)_?[<({{\[]?(?P<letter>[nNiIlLm])(?:(?P<sign>[+-])(?P<distance>\w+))?[>)}}\]]?", re.ASCII
)
_NUMBERED: Final = re.compile(rf"(?P<family>{FAMILY_PATTERN})_?[<({{\[]?-?[0-9]+[>)}}\]]?")


class RefError(CommplanError):
    """A text is not the name of an op or not an index; `code` is the rule that says so, `hint` what to write."""

    def __init__(self, message: str, hint: str, code: str = "CP016") -> None:
        self.code = code
        self.hint = hint
        super().__init__(message)


def parse_index(text: str) -> Index:
    """The index that `text` spells: `n`, `<n>`, `<n-1>`, `<n+k>` or `*`.  `str` of the result parses to it again.

    Raises:
        RefError: if `text` is no index.
    """
    match = _INDEX.fullmatch(text)
    if match is None:
        raise RefError(f"{shown(text)} is not an index", "an index is n, <n-1>, <n+1> or <n-k> with k from `params`")
    if match["every"]:
        return Index(every=True)
    if len(match["value"] or "") > MAX_DIGITS:
        raise RefError(f"the offset in {shown(text)} is too large", f"write {MAX_OFFSET} or less", "CP024")
    if match["sign"] is None or match["value"] == "0":
        return Index()
    distance = Number(param=match["param"]) if match["param"] else Number(value=int(match["value"]))
    return Index(sign=-1 if match["sign"] == "-" else 1, distance=distance)


def parse_ref(text: str, span: Span | None = None) -> OpRef:
    """The op that `text` names, found at `span`.  `str` of the result parses to it again.

    Raises:
        RefError: if `text` names no op.
    """
    match = _REF.fullmatch(text)
    if match is None or (not _INDEX.fullmatch(match["index"])):
        raise RefError(f"{shown(text)} is not the name of an op", _hint(text))
    at = span if span is not None else Span("<text>", 1, 1, len(text), text)
    return OpRef(family=match["family"], index=parse_index(match["index"]), span=at)


def is_ref(text: str) -> bool:
    """Whether `text` names an op."""
    match = _REF.fullmatch(text)
    return match is not None and _INDEX.fullmatch(match["index"]) is not None


def _hint(text: str) -> str:
    tight = "".join(text[:200].split())
    if "," in tight:
        return f"several ops are a list: [{', '.join(part for part in tight.split(',') if part)}]"
    whole = re.fullmatch(FAMILY_PATTERN, tight) is not None
    match = _LOOSE.fullmatch(tight)
    if match and (match["family"] in KIND_OF_FAMILY or not whole or tight.endswith(f"_{match['letter']}")):
        distance = (match["distance"] or "").lstrip("0") or "0"
        index = "n" if distance == "0" else f"<n{match['sign']}{distance}>"
        if _INDEX.fullmatch(index):
            return f"did you mean {match['family']}_{index}?"
    if whole and tight not in ("n", "wait"):
        return f"it lacks an index; did you mean {tight}_n?"
    if match := _NUMBERED.fullmatch(tight):
        return f"a schedule names modules relative to n, not by number: {match['family']}_n, {match['family']}_<n-1>"
    return OP_FORMS
