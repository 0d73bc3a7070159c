"""Values of a schedule, read with their types: each reader returns None where it reported what is wrong."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from commplan.errors import Related, Span
from commplan.language import nodes
from commplan.language.nodes import Node, Refused, Scalar, describe
from commplan.language.refs import NAME_PATTERN
from commplan.language.source import Findings, alternatives, closest, did_you_mean, shown
from commplan.language.spec import Number

LATER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "for": "selectors (`for:`)",
        "pre_forward": "a `pre_forward` section",
    }
)
"""Keys kept for a later version of the language -> what they will be."""

_SIZE: Final = re.compile(r"(?P<count>[0-9]+)(?P<unit>[KMG]i?B)")
UNIT_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
)


@dataclass(frozen=True, slots=True)
class Range:
    """The integers from `least` to `most`, and what they count."""

    what: str
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Scope:
    """What the lines of one schedule may name; an unsound declaration counts, so that it is reported only once."""

    findings: Findings
    params: frozenset[str] = frozenset()
    lanes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping, with its value."""

    key: Scalar
    value: Node


def read_entries(node: Node, what: str, findings: Findings, hint: str) -> dict[str, Entry] | None:
    """The entries of a mapping whose keys are free; the first of a repeated key counts. `hint` is for what is no mapping."""
    if not isinstance(node, nodes.Mapping):
        wrong_type(node, f"{what} is a mapping `key: value`", findings, hint)
        return None
    entries: dict[str, Entry] = {}
    for key, value in node.pairs:
        if isinstance(key, Refused):
            continue
        if not isinstance(key, Scalar) or key.is_null:
            wrong = f"a key of {what} is a word, not {describe(key)}"
            findings.add("CP009", wrong, key.span, "write a word before the colon, or take this entry away")
        elif key.plain and key.value == "<<":
            findings.add("CP005", "the merge key << is not part of the language", key.span, "write the values out")
        elif key.value in entries:
            first = Related("first written here", entries[key.value].key.span)
            findings.add("CP006", f"{shown(key.value)} is written twice", key.span, "keep one of them", (first,))
        else:
            entries[key.value] = Entry(key, value)
    return entries


def read_known(node: Node, what: str, known: Sequence[str], findings: Findings, hint: str) -> dict[str, Entry] | None:
    """The entries of a mapping with keys out of `known`. `hint` is for what is no mapping."""
    entries = read_entries(node, what, findings, hint)
    if entries is None:
        return None
    for name in [name for name in entries if name not in known]:
        unknown_key(entries.pop(name).key, what, known, findings)
    return entries


def unknown_key(key: Scalar, what: str, known: Collection[str], findings: Findings) -> None:
    """Report a key that may not stand here: one of a later version (CP011) or any other (CP007)."""
    if key.value in LATER:
        findings.add("CP011", f"{LATER[key.value]}: not in version 1 of the language", key.span, "remove it")
    else:
        findings.add("CP007", f"{what} has no key {shown(key.value)}", key.span, did_you_mean(key.value, known))


def wrong_type(node: Node, expected: str, findings: Findings, hint: str) -> None:
    """Report that a value has the wrong type, unless it was refused already."""
    if not isinstance(node, Refused):
        findings.add("CP009", f"{expected}, not {describe(node)}", node.span, hint)


def read_text(node: Node, what: str, findings: Findings) -> str | None:
    """A text on one or more lines, without control characters."""
    if not isinstance(node, Scalar) or not node.is_text:
        hint = f"write words after {what[:-1]}: `"
        if isinstance(node, Scalar) and not node.is_null:
            hint = f'quote it to make it a text: "{node.value}"'
        wrong_type(node, f"{what} is a text", findings, hint)
        return None
    if not node.value.replace("\n", "").replace("\t", "").isprintable():
        findings.add("CP002", f"{what} has a character that cannot be printed", node.span, "remove it")
        return None
    return node.value


def read_integer(node: Node, allowed: Range, findings: Findings) -> int | None:
    """A decimal integer within a range."""
    if not isinstance(node, Scalar) or not node.is_integer:
        quoted = isinstance(node, Scalar) and Scalar(node.span, node.value).is_integer
        hint = "remove the quotes" if quoted else f"write a number in digits, {_least(allowed)}"
        wrong_type(node, f"{allowed.what} is an integer", findings, hint)
        return None
    digits = node.value.lstrip("+-").lstrip("0")
    sign = -1 if node.value.startswith("-") else 1
    value = sign * int(digits[: len(str(allowed.most)) + 1] or "0")
    return value if check_range(value, node.value, node.span, allowed, findings) else None


def check_range(value: int, written: str, at: Span, allowed: Range, findings: Findings) -> bool:
    """Report a number (CP024) outside its range."""
    if allowed.least <= value <= allowed.most:
        return True
    bound = f"at least {allowed.least}" if value < allowed.least else f"at most {allowed.most}"
    findings.add(
        "CP024",
        f"{allowed.what} is {bound}, not {shown(written)[1:-1]}",
        at,
        f"write {_least(allowed) if value < allowed.least else f'{allowed.most} or less'}",
    )
    return False


def _least(allowed: Range) -> str:
    return f"{allowed.least} or more"


def read_number(node: Node, allowed: Range, scope: Scope) -> Number | None:
    """An integer within a range, or the name of a param."""
    if isinstance(node, Scalar) and node.is_text and re.fullmatch(NAME_PATTERN, node.value):
        return Number(param=node.value) if check_param(node.value, node.span, scope) else None
    value = read_integer(node, allowed, scope.findings)
    return None if value is None else Number(value=value)


def size_bytes(text: str) -> int | None:
    """The bytes that `64MiB`, `64MB` or `64000000` means; None if `text` is not a size."""
    match = re.fullmatch(rf"(?P<count>[0-9]{{1,20}})(?P<unit>{'|'.join(UNIT_BYTES)})?", text)
    return int(match["count"]) * UNIT_BYTES.get(match["unit"], 1) if match else None


def read_size(node: Node, allowed: Range, scope: Scope) -> Number | None:
    """A number of bytes: `64MiB`, `1000000`, or the name of a param."""
    if not isinstance(node, Scalar) or not node.is_text or re.fullmatch(NAME_PATTERN, node.value):
        return read_number(node, allowed, scope)
    match = _SIZE.fullmatch(node.value)
    if match is None:
        units = {unit.lower(): unit for unit in UNIT_BYTES}
        loose = re.fullmatch(r"([0-9]{1,9})[ _]*([kmg]i?b)", node.value.lower())
        hint = f"did you mean {loose[1]}{units[loose[2]]}?" if loose else ""
        hint = hint or f"write a whole number with {alternatives(UNIT_BYTES)}, as in 1536MiB for one and a half GiB"
        scope.findings.add("CP034", f"{shown(node.value)} is not a size in bytes", node.span, hint)
        return None
    value = int(match["count"][:20]) * UNIT_BYTES[match["unit"]]
    return Number(value=value) if check_range(value, node.value, node.span, allowed, scope.findings) else None


def check_param(name: str, at: Span, scope: Scope) -> bool:
    """Report a param that is not declared (CP020)."""
    if name in scope.params:
        return True
    hint = closest(name, scope.params) or f"declare it under `params`, as in `{name[:40]}: 2`"
    scope.findings.add("CP020", f"{shown(name)} is not declared in `params`", at, hint)
    return False


def read_choice(node: Node, what: str, choices: Mapping[str, str], findings: Findings, hint: str = "") -> str | None:
    """One of a few words, given with what else they are called (or ""). `hint` is for what is close to none."""
    if not isinstance(node, Scalar) or not node.is_text:
        wrong_type(node, f"{what} is {alternatives(choices)}", findings, _choices(what, choices))
        return None
    if node.value not in choices:
        other = {also: choice for choice, also in choices.items() if also}
        close = f"did you mean {other[node.value]}?" if node.value in other else closest(node.value, choices)
        wrong = f"{what} is {alternatives(choices)}, not {shown(node.value)}"
        findings.add("CP013", wrong, node.span, close or hint or _choices(what, choices))
        return None
    return node.value


def _choices(what: str, choices: Mapping[str, str]) -> str:
    return f"write {alternatives(f'{what[:-1]}: {choice}`' for choice in choices)}"
