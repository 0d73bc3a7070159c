"""A JSON Schema (draft 2020-12) of schedules, for editors: made from the tables that the parser reads by.

It has no keyword that draft 7 lacks, because many editors know no later one, but those of `HINTS`.  Patterns are kept to what
regular expressions of ECMAScript and Python mean alike.  It allows every valid schedule.  What needs two places of a file, such
as a param that is not declared, is beyond a schema: `commplan check` finds it.

Some parts stand apart in an `allOf` of their own because of what yaml-language-server writes for a key that somebody chooses: a
list where it sees `items`, a snippet where it sees one, and a required key once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from commplan.language.declarations import (
    COMMUNICATORS,
    LANE_KEYS,
    PARAM_KEYS,
    PARAM_RANGE,
    PRIORITIES,
    RESERVED,
)
from commplan.language.fields import UNIT_BYTES, Range
from commplan.language.lines import ATTRIBUTES, FUSE_KEYS, PLACEABLE, TAKES, WAIT, WHENS
from commplan.language.parsing import KEYS, MAX_NAME_CHARS, SECTIONS
from commplan.language.refs import NAME_PATTERN, OP_FORMS
from commplan.language.spec import LANGUAGE_VERSION
from commplan.language.uses import CHUNKS, FUSE_BYTES, FUSE_MODULES, FUSE_TAIL, OFFSET
from commplan.ops import BUILT_IN_LANES, COMPUTE_LANE, FAMILY_PATTERN, KIND_OF_FAMILY, TRAITS, WIRE_DTYPES, Kind, Section

Schema = dict[str, Any]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
HINTS: Final = frozenset({"patternErrorMessage", "errorMessage", "enumDescriptions", "defaultSnippets"})
"""Keywords that editors read and validators pass over: messages, texts of choices, and what is offered to write."""

_FREE: Final = "free"
_NAME_FORM: Final = "a name has letters, digits and underscores, a letter first"
_NUMBER_FORM: Final = "a whole number, or the name of one of `params`"
_SIZE_FORM: Final = f"a size is a whole number above 0 and a unit, as 64MiB ({', '.join(UNIT_BYTES)}), or a number of bytes"
_FUSE_FORM: Final = "a bucket has one limit: modules or bytes"
_SECTION_FORM: Final = f"at least one of {', '.join(SECTIONS)} has a line"
_LINE_FORM: Final = "a line holds one op, as RS_n or AR_<n-1>, or one `wait`; compute and _* are not placed"
_ROOT_LINE_FORM: Final = "a line of root holds one op, as apply_n, or one `wait`; no offsets, and compute and _* are not placed"
_ROOT_OP_FORMS: Final = "in root an op is written RS_n, without offset; RS_* in `after` and `wait`"

_KEY_TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "version": "The version of the language.",
        "name": "What plans, traces and messages call the schedule: one line.",
        "summary": "What it does, when to use it and what it costs.",
        "params": "Integers that a run may set: `k: 2`, or `k: {default: 2, min: 1, max: 8}`.",
        "lanes": "In-order queues beside the built-in ones: compute, shard and replicate.",
        "pre_backward": "Lines for each module, before its backward computes.",
        "post_backward": "Lines for each module, when its gradients are complete.",
        "root": "Lines that run once, after the last module; `_n` stands for every module in order.",
    }
)
_ATTRIBUTE_TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "after": "One op or a list: complete before this op starts.",
        "lane": "The queue that the op runs on: a built-in one, or one of `lanes`.",
        "fuse": "Several modules in one collective: `{modules: 4}` or `{bytes: 64MiB}`.",
        "chunks": "How many pieces the collective is split into.",
        "dtype": "The type on the wire: cast, reduced in it, cast back. Without it the model's reduce dtype.",
        "when": "In which backwards of an accumulated step the op runs.",
        "kind": "What an op of a free name does.",
        "axis": "The mesh axis of a collective of a free name.",
    }
)
_FUSE_TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "modules": "At most so many modules in one collective.",
        "bytes": "At most so much wire input on one rank: `64MiB`, `64MB` or a number of bytes.",
        "tail": "So many of the last modules stay unfused.",
    }
)
_KIND_TEXTS: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        Kind.ALL_GATHER: "Gather the parameters of a module over the shard axis.",
        Kind.REDUCE_SCATTER: "Reduce the gradients of a module over the shard axis; each rank keeps its shard.",
        Kind.ALL_REDUCE: "Reduce the gradient shard of a module over the replicate axis, in place.",
        Kind.APPLY: "Write the reduced shard of a module to `.grad`.",
    }
)
_CHOICE_TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fp32": "32 bits.",
        "bf16": "16 bits, with the range of fp32.",
        "fp16": "16 bits, with a narrower range: large values overflow.",
        "every": "In each backward: so it is if nothing is written.",
        "last_backward": "In the last backward before the optimizer; partial sums are kept until then.",
        "high": "Ahead of streams of normal priority.",
        "normal": "So it is if nothing is written.",
        "own": "A process group of its own for each axis used on the lane.",
        "shard": "Over the ranks that hold the shards of one replica.",
        "replicate": "Over the ranks that hold the same shard.",
        **{kind.value: text for kind, text in _KIND_TEXTS.items()},
    }
)
_LINE_TEXT: Final = "One op by its name alone, or with its attributes."

# What is offered to write: lines that most schedules have, and values.
_LINES: Final[Mapping[Section, tuple[str, ...]]] = MappingProxyType(
    {
        Section.PRE_BACKWARD: ("wait: AG_n", "AG_<n+1>: {}", "apply_<n-1>: {after: AR_<n-1>}"),
        Section.POST_BACKWARD: (
            "wait: RS_<n-1>",
            "RS_n: {after: compute_n}",
            "AR_n: {after: RS_n}",
            "AR_<n-1>: {after: RS_<n-1>}",
            "apply_<n-1>: {after: AR_<n-1>}",
        ),
        Section.ROOT: ("apply_n: {after: AR_n}", "AR_n: {after: RS_n}"),
    }
)
_FUSES: Final = ("{modules: 4}", "{bytes: 64MiB}", "{modules: 4, tail: 1}")
_WAIT_TEXT: Final = "Compute waits for these ops: one, or a list."
_PARAM_TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "default": "The value where a run sets none.",
        "min": "The least that a run may set.",
        "max": "The most that a run may set.",
    }
)
_LANE_TEXTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "priority": "Of the stream; `normal` if not written.",
        "communicator": "`own`: a process group of its own for each axis used on the lane.",
    }
)


def json_schema() -> Schema:
    """The schema of a schedule file, as plain data."""
    values = {
        "version": {"const": LANGUAGE_VERSION},
        "name": _name(),
        "summary": {"type": "string"},
        "params": _declarations(RESERVED, "no word of the language", _param(), "k: {default: 2, min: 1, max: 8}"),
        "lanes": _declarations(BUILT_IN_LANES, "no built-in lane", _lane(), "outer: {priority: high}"),
        **{section: _lines(Section(section)) for section in SECTIONS},
    }
    return {
        "$schema": DIALECT,
        "title": "commplan schedule",
        "type": "object",
        "required": ["version", "name"],
        "anyOf": [_with_lines(section) for section in SECTIONS],
        **_closed({key: _described(values[key], _KEY_TEXTS[key]) for key in KEYS}),
        "$defs": {
            **{_in_section(TRAITS[kind].family, root): _op(kind, root) for kind in TAKES for root in (False, True)},
            **{_in_section(_FREE, root): _free_op(root) for root in (False, True)},
        },
    }


def _described(schema: Schema, text: str) -> Schema:
    return {"description": text, **schema}


def _closed(properties: Mapping[str, Any]) -> Schema:
    """A mapping with no keys but these."""
    return {"properties": dict(properties), "additionalProperties": False}


def _with_lines(section: str) -> Schema:
    lines = {"type": "array", "minItems": 1, "errorMessage": _SECTION_FORM}
    return {"allOf": [{"required": [section], "errorMessage": _SECTION_FORM}, {"properties": {section: lines}}]}


def _name() -> Schema:
    unprintable = "\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029"
    return {
        "type": "string",
        "maxLength": MAX_NAME_CHARS,
        "pattern": rf"^ *[^ {unprintable}][^{unprintable}]*(?![\s\S])",
        "patternErrorMessage": "a name is one line, and not blank",
    }


def _declarations(taken: Iterable[str], none_of: str, value: Schema, example: str) -> Schema:
    """A mapping from names that are not taken; it may be left empty."""
    return {
        "type": ["object", "null"],
        "propertyNames": {**_named(sorted(taken)), "patternErrorMessage": f"{_NAME_FORM}, and is {none_of}"},
        "additionalProperties": value,
        "allOf": [_offers(example)],
    }


def _named(taken: Iterable[str] = ()) -> Schema:
    """A name that is not taken."""
    but = "".join(rf"(?!{name}$)" for name in taken)
    return {"pattern": f"^{but}{NAME_PATTERN}$", "patternErrorMessage": _NAME_FORM}


def _choice(values: Iterable[str]) -> Schema:
    choices = list(values)
    return {"enum": choices, "enumDescriptions": [_CHOICE_TEXTS[choice] for choice in choices]}


def _offers(*texts: str) -> Schema:
    """What an editor offers to write."""
    return {"defaultSnippets": [{"label": text, "bodyText": text} for text in texts]}


def _param() -> Schema:
    integer = _integer(PARAM_RANGE)
    fields = {key: _described(integer, _PARAM_TEXTS[key]) for key in PARAM_KEYS}
    return {
        "description": "An integer that a run may set.",
        "type": ["integer", "object"],
        **_bounds(PARAM_RANGE),
        **_closed(fields),
        "allOf": [{"required": ["default"]}],
    }


def _lane() -> Schema:
    choices = {"priority": PRIORITIES, "communicator": COMMUNICATORS}
    fields = {key: _described(_choice(choices[key]), _LANE_TEXTS[key]) for key in LANE_KEYS}
    return {"description": "An in-order queue.", "type": ["object", "null"], **_closed(fields)}


# Lines


def _lines(section: Section) -> Schema:
    return {"type": ["array", "null"], "items": _line(section)}


def _line(section: Section) -> Schema:
    """One op by its name alone, or a mapping with one key: an op with its attributes, or `wait`.

    Families with a kind of their own and families of a free name take different attributes.  Some names are listed too, for
    an editor to offer.
    """
    root = section is Section.ROOT
    index = _index(offsets=not root)
    families = [TRAITS[kind].family for kind in TAKES]
    free = rf"(?!(?:{'|'.join(KIND_OF_FAMILY)})_(?:n$|<)){FAMILY_PATTERN}"
    ops = {family: {"$ref": f"#/$defs/{_in_section(family, root)}"} for family in (*families, _FREE)}
    offered = ["n"] if root else ["n", "<n-1>"]
    wait = _described(_refs(root, families), _WAIT_TEXT)
    return {
        "description": _LINE_TEXT,
        "type": ["object", "string"],
        "pattern": _whole(f"(?:{'|'.join(families)})_{index}"),
        "patternErrorMessage": _ROOT_OP_FORMS if root else OP_FORMS,
        "errorMessage": _ROOT_LINE_FORM if root else _LINE_FORM,
        **_offers(*_LINES[section]),
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {WAIT: wait, **{f"{family}_{n}": ops[family] for family in families for n in offered}},
        "patternProperties": {
            **{_whole(f"{family}_{index}"): ops[family] for family in families},
            _whole(f"{free}_{index}"): ops[_FREE],
        },
        "additionalProperties": False,
    }


def _in_section(family: str, root: bool) -> str:
    """What the definition of a family's attributes is called."""
    return f"{family}_in_root" if root else family


def _op(kind: Kind, root: bool) -> Schema:
    """The attributes of a built-in op."""
    attributes = {name: schema for name, schema in _attributes(root).items() if name in TAKES[kind]}
    lane = attributes["lane"]
    text = f"{lane['description']} `{TRAITS[kind].lane}` if not written."
    attributes["lane"] = {**lane, **_lane_of(kind), "description": text}
    return _described({"type": ["object", "null"], **_closed(attributes)}, _KIND_TEXTS[kind])


def _free_op(root: bool) -> Schema:
    """The attributes of an op of a free name: what they may be depends on its kind."""
    return {
        "description": "An op of a free name: `kind` says what it does.",
        "type": "object",
        **_closed(_attributes(root)),
        "allOf": [
            {"required": ["kind"]},
            *({"if": {"properties": {"kind": {"const": kind}}}, "then": _only(Kind(kind))} for kind in PLACEABLE),
        ],
    }


def _only(kind: Kind) -> Schema:
    """What the attributes of an op of a free name are limited to by its kind."""
    refused: dict[str, Any] = {name: False for name in ATTRIBUTES if name not in (*TAKES[kind], "kind", "axis")}
    axis = TRAITS[kind].axis
    refused["axis"] = False if axis is None else {"const": axis}
    return {"properties": {**refused, **({"lane": lane} if (lane := _lane_of(kind)) else {})}}


def _attributes(root: bool) -> dict[str, Schema]:
    """Every attribute by name."""
    axes = {TRAITS[Kind(kind)].axis: None for kind in PLACEABLE}
    values: dict[str, Schema] = {
        "after": _refs(root, [TRAITS[kind].family for kind in Kind if kind is not Kind.APPLY]),
        "lane": {"type": "string", **_named(), **_offers(*BUILT_IN_LANES)},
        "fuse": _fuse(),
        "chunks": _number(CHUNKS, "2", "4"),
        "dtype": _choice(WIRE_DTYPES),
        "when": _choice(WHENS),
        "kind": _choice(PLACEABLE),
        "axis": _choice(axis for axis in axes if axis is not None),
    }
    return {name: _described(values[name], _ATTRIBUTE_TEXTS[name]) for name in ATTRIBUTES}


def _lane_of(kind: Kind) -> Schema:
    """What the lane of an op is limited to: no collective runs on compute."""
    if TRAITS[kind].axis is None:
        return {}
    message = f"{_NAME_FORM}; a collective never runs on {COMPUTE_LANE}"
    lanes = [lane for lane in BUILT_IN_LANES if lane != COMPUTE_LANE]
    return {"type": "string", **_named([COMPUTE_LANE]), "patternErrorMessage": message, **_offers(*lanes)}


def _fuse() -> Schema:
    size = {
        **_number(FUSE_BYTES, "25MiB", "64MiB"),
        "pattern": _whole(f"{NAME_PATTERN}|0*[1-9][0-9]*(?:{'|'.join(UNIT_BYTES)})"),
        "patternErrorMessage": _SIZE_FORM,
    }
    values = {"modules": _number(FUSE_MODULES, "2", "4"), "bytes": size, "tail": _number(FUSE_TAIL, "1", "2")}
    fields = {key: _described(values[key], _FUSE_TEXTS[key]) for key in FUSE_KEYS}
    return {
        "type": "object",
        **_closed(fields),
        "if": {"required": ["modules"]},
        "then": {"properties": {"bytes": False}, "errorMessage": _FUSE_FORM},
        "else": {"required": ["bytes"], "errorMessage": _FUSE_FORM},
        **_offers(*_FUSES),
    }


# Numbers and names of ops


def _integer(allowed: Range) -> Schema:
    return {"type": "integer", **_bounds(allowed)}


def _number(allowed: Range, *offered: str) -> Schema:
    """An integer, or the name of a param."""
    name = {**_named(), "patternErrorMessage": _NUMBER_FORM}
    return {"type": ["integer", "string"], **_bounds(allowed), **name, **_offers(*offered)}


def _bounds(allowed: Range) -> Schema:
    return {"minimum": allowed.least, "maximum": allowed.most}


def _refs(root: bool, families: Iterable[str]) -> Schema:
    """One op or a list of ops, to wait for; those of some families are offered."""
    one = {
        "type": "string",
        "pattern": _whole(f"{FAMILY_PATTERN}_{_index(every=True, offsets=not root)}"),
        "patternErrorMessage": _ROOT_OP_FORMS if root else OP_FORMS,
    }
    indices = ("n", "*") if root else ("n", "<n-1>")
    offered = _offers(*(f"{family}_{index}" for family in families for index in indices))
    return {**one, "type": ["string", "array"], "minItems": 1, "allOf": [{"items": {**one, **offered}}]}


def _index(*, every: bool = False, offsets: bool = True) -> str:
    """A pattern for an index; `every`: also `*`; not `offsets`: `n` alone."""
    distance = rf"(?:[+-](?:{decimal_pattern(OFFSET.most)}|{NAME_PATTERN}))?" if offsets else ""
    return rf"(?:n|<n{distance}>{'|[*]' if every else ''})"


def decimal_pattern(most: int) -> str:
    """A pattern for the decimal numbers 0 to `most`, without leading zeros."""
    digits = str(most)
    forms = ["0"] if most else []
    if len(digits) > 1:
        forms.append(f"[1-9][0-9]{{0,{len(digits) - 2}}}")
    for place, digit in enumerate(digits):
        least = 1 if place == 0 else 0
        if int(digit) > least:
            forms.append(f"{digits[:place]}[{least}-{int(digit) - 1}]" + "[0-9]" * (len(digits) - place - 1))
    return f"(?:{'|'.join([*forms, digits])})"


def _whole(pattern: str) -> str:
    return f"^(?:{pattern})$"
