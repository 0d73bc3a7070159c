"""A JSON Schema (draft 2020-12) of schedules, for editors: made from the tables that the parser reads by.

It has no keyword that draft 7 lacks, because many editors know no later one.  Patterns are kept to what regular expressions of
ECMAScript and Python mean alike.  It allows every valid schedule.  What needs two places of a file, such as a param that is not
declared, is beyond a schema: `commplan check` finds it.
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
_FREE: Final = "free"

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
        "params": _declarations(RESERVED, _param()),
        "lanes": _declarations(BUILT_IN_LANES, _lane()),
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
    return {"required": [section], "properties": {section: {"type": "array", "minItems": 1}}}


def _name() -> Schema:
    unprintable = "[\\u0000-\\u001f\\u007f-\\u009f\\u2028\\u2029]"
    return {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_NAME_CHARS,
        "pattern": "[^ ]",
        "not": {"pattern": unprintable},
    }


def _declarations(taken: Iterable[str], value: Schema) -> Schema:
    """A mapping from names that are not taken; it may be left empty."""
    names = {"pattern": _whole(NAME_PATTERN), "not": {"enum": sorted(taken)}}
    return {"type": ["object", "null"], "propertyNames": names, "additionalProperties": value}


def _param() -> Schema:
    integer = _integer(PARAM_RANGE)
    fields = {key: _described(integer, _PARAM_TEXTS[key]) for key in PARAM_KEYS}
    return {"type": ["integer", "object"], **_bounds(PARAM_RANGE), "required": ["default"], **_closed(fields)}


def _lane() -> Schema:
    choices = {"priority": PRIORITIES, "communicator": COMMUNICATORS}
    fields = {key: _described({"enum": list(choices[key])}, _LANE_TEXTS[key]) for key in LANE_KEYS}
    return {"type": ["object", "null"], **_closed(fields)}


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
    wait = _described(_refs(root), _WAIT_TEXT)
    return {
        "type": ["object", "string"],
        "pattern": _whole(f"(?:{'|'.join(families)})_{index}"),
        "patternErrorMessage": OP_FORMS,
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
    attributes["lane"] = _lane_of(kind, attributes["lane"])
    return _described({"type": ["object", "null"], **_closed(attributes)}, _KIND_TEXTS[kind])


def _free_op(root: bool) -> Schema:
    """The attributes of an op of a free name: what they may be depends on its kind."""
    return {
        "description": "An op of a free name: `kind` says what it does.",
        "type": "object",
        "required": ["kind"],
        **_closed(_attributes(root)),
        "allOf": [{"if": {"properties": {"kind": {"const": kind}}}, "then": _only(Kind(kind))} for kind in PLACEABLE],
    }


def _only(kind: Kind) -> Schema:
    """What the attributes of an op of a free name are limited to by its kind."""
    refused: dict[str, Any] = {name: False for name in ATTRIBUTES if name not in (*TAKES[kind], "kind", "axis")}
    axis = TRAITS[kind].axis
    refused["axis"] = False if axis is None else {"const": axis}
    return {"properties": {**refused, "lane": _lane_of(kind, {})}}


def _attributes(root: bool) -> dict[str, Schema]:
    """Every attribute by name."""
    axes = {TRAITS[Kind(kind)].axis: None for kind in PLACEABLE}
    values: dict[str, Schema] = {
        "after": _refs(root),
        "lane": {"type": "string", "pattern": _whole(NAME_PATTERN)},
        "fuse": _fuse(),
        "chunks": {**_number(CHUNKS), "default": 1},
        "dtype": {"enum": list(WIRE_DTYPES)},
        "when": {"enum": list(WHENS)},
        "kind": {"enum": list(PLACEABLE)},
        "axis": {"enum": [axis for axis in axes if axis is not None]},
    }
    return {name: _described(values[name], _ATTRIBUTE_TEXTS[name]) for name in ATTRIBUTES}


def _lane_of(kind: Kind, lane: Schema) -> Schema:
    """`lane`, with the kind's own as default; no collective runs on compute."""
    collective = {"not": {"const": COMPUTE_LANE}} if TRAITS[kind].axis is not None else {}
    return {**lane, "default": TRAITS[kind].lane, **collective}


def _fuse() -> Schema:
    units = "|".join(UNIT_BYTES)
    size = {**_number(FUSE_BYTES), "pattern": _whole(f"{NAME_PATTERN}|0*[1-9][0-9]*(?:{units})")}
    values = {"modules": _number(FUSE_MODULES), "bytes": size, "tail": _number(FUSE_TAIL)}
    fields = {key: _described(values[key], _FUSE_TEXTS[key]) for key in FUSE_KEYS}
    return {"type": "object", "oneOf": [{"required": ["modules"]}, {"required": ["bytes"]}], **_closed(fields)}


# Numbers and names of ops


def _integer(allowed: Range) -> Schema:
    return {"type": "integer", **_bounds(allowed)}


def _number(allowed: Range) -> Schema:
    """An integer, or the name of a param."""
    return {"type": ["integer", "string"], "pattern": _whole(NAME_PATTERN), **_bounds(allowed)}


def _bounds(allowed: Range) -> Schema:
    return {"minimum": allowed.least, "maximum": allowed.most}


def _refs(root: bool) -> Schema:
    """One op or a list of ops, to wait for."""
    one = _ref(_index(every=True, offsets=not root))
    return {**one, "type": ["string", "array"], "minItems": 1, "items": one}


def _ref(index: str) -> Schema:
    return {"type": "string", "pattern": _whole(f"{FAMILY_PATTERN}_{index}"), "patternErrorMessage": OP_FORMS}


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
