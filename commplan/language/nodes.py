"""YAML as a tree of nodes with places. Aliases, anchors and tags are refused, so the tree is as small as the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from commplan.errors import Related, Span
from commplan.language.source import Findings, Source, shown

MAX_DEPTH: Final = 16
"""Deepest nesting of lists and mappings that is read; a schedule needs six."""

_NULL: Final = re.compile(r"~|null|Null|NULL|")
_BOOL: Final = re.compile(r"true|True|TRUE|false|False|FALSE")
_INTEGER: Final = re.compile(r"[-+]?[0-9]+")
_OTHER_NUMBER: Final = re.compile(
    r"0o[0-7]+|0x[0-9a-fA-F]+|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)

_SYNTAX_HINTS: Final = (
    ("'\\t'", "indent with spaces: YAML does not allow tabs there"),
    (
        "mapping values are not allowed",
        "put the attributes of an op in braces, as in `- AR_n: {after: RS_n}`, and quote a text that has ': ' in it",
    ),
    ("expected <block end>", "begin the entries of one list or mapping in the same column"),
    ("could not find expected ':'", "a key is followed by ': '; entries of one mapping begin in the same column"),
    ("flow sequence", "close the '['; entries are separated by commas"),
    ("flow mapping", "close the '{'; entries are separated by commas"),
    ("unexpected end of stream", "close the quotes"),
    ("cannot start any token", "quote a text that begins with this character"),
)


_ANY_SYNTAX_HINT: Final = "check brackets, quotes, colons and indentation from here upwards"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A word, a number or a text. `plain`: not quoted, so it may be a number, true, false or nothing."""

    span: Span
    value: str
    plain: bool = True

    @property
    def is_null(self) -> bool:
        """Whether it says nothing: empty, `~` or `null`."""
        return self.plain and _NULL.fullmatch(self.value) is not None

    @property
    def is_integer(self) -> bool:
        """Whether it is a decimal integer."""
        return self.plain and _INTEGER.fullmatch(self.value) is not None

    @property
    def is_text(self) -> bool:
        """Whether it is a text: quoted, or nothing else that YAML knows."""
        return not self.plain or not any(p.fullmatch(self.value) for p in (_NULL, _BOOL, _INTEGER, _OTHER_NUMBER))


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    span: Span
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """Pairs of key and value as written: keys may repeat, and may be anything."""

    span: Span
    pairs: tuple[tuple[Node, Node], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for what was reported already, so that reading goes on around it."""

    span: Span


Node = Scalar | Sequence | Mapping | Refused


def describe(node: Node) -> str:
    """What a node is, for a message: "the number 3", "a list"."""
    match node:
        case Scalar() if node.is_null:
            return "nothing"
        case Scalar() if node.is_text:
            return f"the text {shown(node.value)}"
        case Scalar():
            return node.value if _BOOL.fullmatch(node.value) else f"the number {shown(node.value)[1:-1]}"
        case Sequence():
            return "a list"
        case _:
            return "a mapping"


def compose(source: Source, findings: Findings) -> Node | None:
    """The tree of the one document in `source`; None (and why, in `findings`) where there is none.

    A violation of CP001, CP003 or CP004 ends the reading, one of CP005 does not.
    """
    composer = _Composer(source, findings)
    try:
        # Events are taken one by one: looking ahead in deep brackets is what is slow in the YAML library.
        for event in YAML(typ="safe", pure=True).parse(source.text):
            if not composer.take(event):
                return None
    except MarkedYAMLError as error:
        _report_syntax(error, source, findings)
        return None
    except (YAMLError, ValueError, OverflowError) as error:  # e.g. "\UFFFFFFFF": no such character
        wrong = f"not YAML: {shown(str(error), 120)[1:-1]}"
        findings.add("CP001", wrong, source.span(0, 0), "write a plain text without escapes such as \\U")
        return None
    if composer.root is None or (isinstance(composer.root, Scalar) and composer.root.is_null):
        findings.add(
            "CP003",
            "the file holds no schedule",
            source.span(0, 0),
            "write `version: 1`, a `name` and a section with lines; `commplan new NAME` writes a file to start from",
        )
        return None
    return composer.root


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not come yet."""

    start: int
    is_mapping: bool
    children: list[Node]


class _Composer:
    """Builds the tree from events, without recursion."""

    def __init__(self, source: Source, findings: Findings) -> None:
        self.root: Node | None = None
        self._source = source
        self._findings = findings
        self._open: list[_Open] = []
        self._num_documents = 0

    def take(self, event: Any) -> bool:
        """Work in one event; False where reading must end."""
        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, NodeEvent):
            self._refuse_decoration(event, self._source.span(start, end))
        match event:
            case DocumentStartEvent():
                self._num_documents += 1
                if self._num_documents > 1:
                    at = self._source.span(start, end)
                    self._findings.add("CP005", "a second document begins here", at, "write one schedule per file")
                    return False
            case AliasEvent():
                self._add(Refused(self._source.span(start, end)))
            case ScalarEvent():
                self._add(Scalar(self._scalar_span(event.value, start, end), event.value, event.style is None))
            case SequenceStartEvent() | MappingStartEvent():
                self._open.append(_Open(start, isinstance(event, MappingStartEvent), []))
                if len(self._open) > MAX_DEPTH:
                    at = self._source.span(start, start + 1)
                    self._findings.add(
                        "CP004", f"nested more than {MAX_DEPTH} deep", at, "take brackets away: a schedule needs six levels"
                    )
                    return False
            case SequenceEndEvent() | MappingEndEvent():
                done = self._open.pop()
                self._add(_closed(done, self._source.span(done.start, end)))
        return True

    def _add(self, node: Node) -> None:
        if self._open:
            self._open[-1].children.append(node)
        else:
            self.root = node

    def _refuse_decoration(self, event: Any, at: Span) -> None:
        """Report anchors, aliases and tags: none has a use here, and chains of aliases grow without bound."""
        if isinstance(event, AliasEvent):
            self._findings.add("CP005", f"the alias *{event.anchor} is not part of the language", at, "write the value out")
        elif event.anchor is not None:
            self._findings.add("CP005", f"the anchor &{event.anchor} is not part of the language", at, "remove it")
        elif getattr(event, "ctag", None) is not None:
            tag = at.text[at.column - 1 :].split(maxsplit=1)[0]
            self._findings.add("CP005", f"the tag {shown(tag)[1:-1]} is not part of the language", at, "remove it")

    def _scalar_span(self, value: str, start: int, end: int) -> Span:
        """The place of a scalar; one that is not there is placed at what it belongs to: its key or the dash of its item."""
        if value or end > start:
            return self._source.span(start, end)
        siblings = self._open[-1].children if self._open else []
        if self._open and self._open[-1].is_mapping and len(siblings) % 2:
            return siblings[-1].span
        dash = self._source.text.rfind("-", 0, start)
        return self._source.span(max(dash, 0), max(dash, 0) + 1)


def _closed(done: _Open, span: Span) -> Node:
    if done.is_mapping:
        children: Iterator[Node] = iter(done.children)
        return Mapping(span, tuple(zip(children, children, strict=True)))
    return Sequence(span, tuple(done.children))


def _report_syntax(error: MarkedYAMLError, source: Source, findings: Findings) -> None:
    problem = " ".join(str(error.problem or error.context or "not YAML").split())
    texts = f"{problem} {error.context or ''}"
    hint = next((hint for part, hint in _SYNTAX_HINTS if part in texts), _ANY_SYNTAX_HINT)
    mark = error.problem_mark or error.context_mark
    index = mark.index if mark is not None else 0
    related: tuple[Related, ...] = ()
    if error.context_mark is not None and error.context and error.context_mark.index != index:
        begin = error.context_mark.index
        related = (Related(" ".join(str(error.context).split()), source.span(begin, begin + 1)),)
    findings.add("CP001", f"not YAML: {problem[:200]}", source.span(index, index + 1), hint, related)
