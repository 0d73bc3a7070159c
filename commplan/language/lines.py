"""The lines of a section: ops to place, and waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from commplan.errors import Related
from commplan.language import nodes
from commplan.language.fields import (
    LATER,
    Entry,
    Scope,
    check_param,
    check_range,
    read_choice,
    read_entries,
    read_known,
    read_number,
    read_size,
    unknown_key,
    wrong_type,
)
from commplan.language.nodes import Node, Scalar
from commplan.language.refs import WAIT_FORM, RefError, is_ref, parse_ref
from commplan.language.source import alternatives, closest, shown
from commplan.language.spec import Fuse, Line, OpLine, OpRef, WaitLine
from commplan.language.uses import CHUNKS, FUSE_BYTES, FUSE_MODULES, FUSE_TAIL, OFFSET
from commplan.ops import BUILT_IN_LANES, COMPUTE_LANE, KIND_OF_FAMILY, TRAITS, WIRE_DTYPES, Axis, Kind, Section, When

WAIT: Final = "wait"
ATTRIBUTES: Final = ("after", "lane", "fuse", "chunks", "dtype", "when", "kind", "axis")
FUSE_KEYS: Final = ("modules", "bytes", "tail")
FUSE_FORM: Final = "as in `fuse: {modules: 4}` or `fuse: {bytes: 64MiB}`"
LINE_FORM: Final = "as in `- RS_n: {after: compute_n}` or `- wait: RS_<n-1>`"
_ATTRIBUTES_FORM: Final = "as in `- {}: {{after: compute_n}}`"

PLACEABLE: Final[Mapping[str, str]] = MappingProxyType({k: t.family for k, t in TRAITS.items() if k is not Kind.COMPUTE})
AXES: Final[Mapping[str, str]] = MappingProxyType(dict.fromkeys(Axis, ""))
WHENS: Final[Mapping[str, str]] = MappingProxyType(dict.fromkeys(When, ""))
_REDUCTION: Final = frozenset({"after", "lane", "fuse", "chunks", "dtype", "when"})
TAKES: Final[Mapping[Kind, frozenset[str]]] = MappingProxyType(
    {
        Kind.ALL_GATHER: frozenset({"after", "lane", "fuse", "chunks"}),
        Kind.REDUCE_SCATTER: _REDUCTION,
        Kind.ALL_REDUCE: _REDUCTION,
        Kind.APPLY: frozenset({"after", "lane"}),
    }
)
_REFUSED_BECAUSE: Final[Mapping[tuple[Kind, str], str]] = MappingProxyType(
    {
        (Kind.APPLY, "when"): "remove it, or move it to the reduction before: when that is skipped, so is the apply",
        (Kind.APPLY, "dtype"): "remove it, or move it to the reduction before",
        (Kind.ALL_GATHER, "when"): "remove it: parameters are needed in every backward",
        (Kind.ALL_GATHER, "dtype"): "remove it: parameters are gathered in the dtype of compute",
    }
)


def read_lines(node: Node, section: Section, scope: Scope) -> tuple[Line, ...]:
    """The sound lines of a section; what is wrong with the others is reported."""
    if isinstance(node, Scalar) and node.is_null:
        return ()
    if not isinstance(node, nodes.Sequence):
        wrong_type(node, f"`{section}` is a list of lines", scope.findings, f"begin each line under `{section}:` with `- `")
        return ()
    lines = [line for item in node.items for line in _read_item(item, section, scope)]
    return tuple(line for line in lines if line is not None)


def _read_item(item: Node, section: Section, scope: Scope) -> list[Line | None]:
    """The lines that one item of a list holds: one, or it is reported."""
    if isinstance(item, Scalar) and not item.is_null:
        return [_read_op(Entry(item, Scalar(item.span, "")), section, scope)]
    entries = None
    if isinstance(item, nodes.Mapping):
        entries = read_entries(item, "a line", scope.findings, LINE_FORM)
    else:
        wrong_type(item, "a line is an op or a wait", scope.findings, LINE_FORM)
    if entries is None:
        return []
    _check_one_key(item, entries, scope)
    return [_read_entry(entry, section, scope) for name, entry in entries.items() if name not in (*ATTRIBUTES, *LATER)]


def _check_one_key(item: Node, entries: Mapping[str, Entry], scope: Scope) -> None:
    names = list(entries)
    for name in names:
        if name in LATER:
            unknown_key(entries[name].key, "a line", (), scope.findings)
    names = [name for name in names if name not in LATER]
    stray = [name for name in names if name in ATTRIBUTES]
    ops = [name for name in names if name not in ATTRIBUTES]
    if stray and ops:
        wrong = f"`{stray[0]}` stands beside {shown(ops[0])}, not under it"
        value = entries[stray[0]].value
        written = shown(value.value)[1:-1] if isinstance(value, Scalar) else "..."
        hint = f"write `- {ops[0][:40]}: {{{stray[0]}: {written}}}`, or indent `{stray[0]}` deeper than the op"
        scope.findings.add("CP015", wrong, entries[stray[0]].key.span, hint)
    elif stray:
        scope.findings.add(
            "CP015",
            f"`{stray[0]}` belongs to no op",
            entries[stray[0]].key.span,
            f"write it under its op, as in `- RS_n: {{{stray[0]}: ...}}`",
        )
    elif len(ops) > 1:
        wrong = f"a line places one op, and {shown(ops[1])} is a second one"
        scope.findings.add("CP015", wrong, entries[ops[1]].key.span, "begin another line for it, with `- `")
    elif not entries:
        scope.findings.add("CP015", "a line without an op", item.span, f"remove it, or write an op or a wait, {LINE_FORM}")


def _read_entry(entry: Entry, section: Section, scope: Scope) -> Line | None:
    if entry.key.value == WAIT:
        refs = _read_refs(entry.value, "`wait`", section, scope)
        return WaitLine(refs=refs, span=entry.key.span) if refs else None
    return _read_op(entry, section, scope)


def _read_op(entry: Entry, section: Section, scope: Scope) -> OpLine | None:
    before = len(scope.findings.violations)
    ref = _read_ref(entry.key, section, scope)
    empty = isinstance(entry.value, Scalar) and entry.value.is_null
    if ref is None and not isinstance(entry.value, nodes.Mapping):
        return None  # whatever was meant, it has no attributes
    attributes = {} if empty else _read_attributes(entry, scope)
    values = {name: _READERS[name](field.value, section, scope) for name, field in attributes.items()}
    kind = _kind_of(ref, attributes, values, scope) if ref is not None else None
    if ref is not None and ref.index.every:
        scope.findings.add("CP017", f"{ref} places an op of every module at once", ref.span, f"write {ref.family}_n")
    if ref is None or kind is None:
        return None
    _check_attributes(kind, ref, attributes, values, scope)
    if len(scope.findings.violations) > before:
        return None
    traits = TRAITS[kind]
    spans = {name: field.key.span for name, field in attributes.items()}
    return OpLine(**{"axis": traits.axis, "lane": traits.lane, **values, "ref": ref, "kind": kind, "spans": spans})


def _read_attributes(entry: Entry, scope: Scope) -> dict[str, Entry]:
    """The attributes written under an op."""
    name = shown(entry.key.value)[1:-1]
    if not isinstance(entry.value, nodes.Mapping):
        wrong_type(entry.value, "what follows an op are its attributes", scope.findings, _ATTRIBUTES_FORM.format(name))
        return {}
    attributes = read_entries(entry.value, name, scope.findings, _ATTRIBUTES_FORM.format(name)) or {}
    named = [*_texts(attributes["after"].value), *filter(is_ref, attributes)] if "after" in attributes else []
    for key in [key for key in attributes if key not in ATTRIBUTES]:
        field = attributes.pop(key)
        if key in named:
            wrong = f"the op {shown(key)} stands where an attribute belongs"
            scope.findings.add("CP007", wrong, field.key.span, f"several ops are a list: `after: [{', '.join(named)}]`")
        else:
            unknown_key(field.key, f"an op such as {name}", ATTRIBUTES, scope.findings)
    return attributes


def _texts(node: Node) -> list[str]:
    items = node.items if isinstance(node, nodes.Sequence) else (node,)
    return [item.value for item in items if isinstance(item, Scalar)]


def _kind_of(ref: OpRef, attributes: Mapping[str, Entry], values: Mapping[str, Any], scope: Scope) -> Kind | None:
    """The kind of an op: that of its family, or the one written for a family of a free name."""
    kind = KIND_OF_FAMILY.get(ref.family)
    if kind is Kind.COMPUTE:
        hint = f"remove it: a schedule places communication and apply. To wait for it write {ref} in `after` or `wait`"
        scope.findings.add("CP019", f"{ref} cannot be placed: compute runs by itself", ref.span, hint)
        return None
    if kind is not None:
        for name in ("kind", "axis"):
            if name in attributes:
                wrong = f"`{name}` is fixed for {ref.family}: only an op of another name has one"
                scope.findings.add("CP030", wrong, attributes[name].key.span, f"remove `{name}`")
        return kind
    if "kind" not in attributes:
        close = closest(ref.family, KIND_OF_FAMILY)
        hint = f"say what it does with {alternatives(f'`kind: {kind}`' for kind in PLACEABLE)}"
        hint = f"{close} Otherwise {hint}" if close else hint
        scope.findings.add("CP029", f"{ref.family} is no built-in op and has no `kind`", ref.span, hint)
        return None
    return Kind(values["kind"]) if values["kind"] is not None else None


def _check_attributes(kind: Kind, ref: OpRef, attributes: Mapping[str, Entry], values: Mapping[str, Any], scope: Scope) -> None:
    """Check what depends on the kind of the op: which attributes it takes, its axis and its lane."""
    findings = scope.findings
    axis = TRAITS[kind].axis
    for name, field in attributes.items():
        if name not in TAKES[kind] and name not in ("kind", "axis"):
            hint = _REFUSED_BECAUSE.get((kind, name), f"remove `{name}`: only collectives have it")
            findings.add("CP032", f"`{name}` means nothing for {kind}", field.key.span, hint)
    if axis is None and "axis" in attributes:
        findings.add("CP032", f"`axis` means nothing for {kind}", attributes["axis"].key.span, "remove it")
    if axis is Axis.SHARD and values.get("axis") is Axis.REPLICATE:
        wrong = f"{kind} over the replicate axis (hierarchical all-reduce): not in version 1 of the language"
        findings.add(
            "CP011", wrong, attributes["axis"].value.span, "reduce over that axis with one op, as in `- AR_n: {after: RS_n}`"
        )
    if axis is not None and values.get("lane") == COMPUTE_LANE:
        at = attributes["lane"].value.span
        hint = f"remove `lane`, or name another, as in `lane: {TRAITS[kind].lane}`"
        findings.add("CP028", f"{ref.family} is a collective, and those do not run on compute", at, hint)


def check_families(lines: tuple[Line, ...], scope: Scope) -> None:
    """Check that each family has one kind (CP031)."""
    first: dict[str, OpLine] = {}
    for line in lines:
        if isinstance(line, OpLine):
            before = first.setdefault(line.ref.family, line)
            if (before.kind, before.axis) != (line.kind, line.axis):
                wrong = f"{line.ref.family} has a second meaning here: {_meaning(line)}"
                related = Related(f"first {_meaning(before)}", before.span)
                scope.findings.add(
                    "CP031", wrong, line.span, f"call one of the two otherwise, as in `my_{line.ref}`", (related,)
                )


def _meaning(line: OpLine) -> str:
    return f"{line.kind}" if line.axis is None else f"{line.kind} over the {line.axis} axis"


# Readers of attributes: each takes the value, the section and the scope; None where it reported a fault.


def _read_ref(node: Node, section: Section, scope: Scope) -> OpRef | None:
    if not isinstance(node, Scalar) or node.is_null:
        hint = "take the inner brackets away" if isinstance(node, nodes.Sequence) else "name one, or take this entry away"
        wrong_type(node, "expected an op as in RS_<n-1>", scope.findings, hint)
        return None
    try:
        ref = parse_ref(node.value, node.span)
    except RefError as error:
        scope.findings.add(error.code, str(error), node.span, WAIT_FORM if closest(node.value, (WAIT,)) else error.hint)
        return None
    if section is Section.ROOT and ("<" in node.value and node.value != f"{ref.family}_<n>"):
        hint = f"write {ref.family}_n: in root it stands for every module in order"
        scope.findings.add(
            "CP018", f"{shown(node.value)[1:-1]} has an offset, and root has no module to count from", node.span, hint
        )
        return None
    distance = ref.index.distance
    if distance.param is not None:
        return ref if check_param(distance.param, node.span, scope) else None
    return ref if check_range(distance.value or 0, str(distance), node.span, OFFSET, scope.findings) else None


def _read_refs(node: Node, what: str, section: Section, scope: Scope) -> tuple[OpRef, ...]:
    """One op or a list of ops."""
    if isinstance(node, nodes.Sequence) and not node.items:
        scope.findings.add("CP009", f"{what} is one op or a list of ops, and this list is empty", node.span, f"remove {what}")
    elif isinstance(node, nodes.Mapping) or (isinstance(node, Scalar) and node.is_null):
        wrong_type(node, f"{what} is one op or a list of ops", scope.findings, f"as in {what[:-1]}: RS_<n-1>`")
        return ()
    items = node.items if isinstance(node, nodes.Sequence) else (node,)
    refs = [_read_ref(item, section, scope) for item in items]
    return tuple(ref for ref in refs if ref is not None)


def _read_after(node: Node, section: Section, scope: Scope) -> tuple[OpRef, ...]:
    return _read_refs(node, "`after`", section, scope)


def _read_lane(node: Node, _: Section, scope: Scope) -> str | None:
    if not isinstance(node, Scalar) or not node.is_text:
        wrong_type(node, "`lane` is the name of a lane", scope.findings, "as in `lane: replicate`")
        return None
    if node.value not in scope.lanes and node.value not in BUILT_IN_LANES:
        close = closest(node.value, {*scope.lanes, *BUILT_IN_LANES})
        hint = close or f"declare it under `lanes`, as in `{node.value[:40]}: {{}}`"
        scope.findings.add("CP026", f"the lane {shown(node.value)} is not declared", node.span, hint)
        return None
    return node.value


def _read_fuse(node: Node, _: Section, scope: Scope) -> Fuse | None:
    if not isinstance(node, nodes.Mapping):
        wrong_type(node, "`fuse` is a mapping", scope.findings, FUSE_FORM)
        return None
    before = len(scope.findings.violations)
    fields = read_known(node, "`fuse`", FUSE_KEYS, scope.findings, FUSE_FORM) or {}
    limits = [name for name in ("modules", "bytes") if name in fields]
    if len(limits) > 1:
        hint = "keep one of them"
        scope.findings.add("CP033", "`fuse` has both `modules` and `bytes`", fields[limits[1]].key.span, hint)
    elif not limits:
        scope.findings.add("CP033", "`fuse` has neither `modules` nor `bytes`", node.span, FUSE_FORM)
    modules = read_number(fields["modules"].value, FUSE_MODULES, scope) if "modules" in fields else None
    size = read_size(fields["bytes"].value, FUSE_BYTES, scope) if "bytes" in fields else None
    tail = read_number(fields["tail"].value, FUSE_TAIL, scope) if "tail" in fields else None
    if len(scope.findings.violations) > before:
        return None
    return Fuse(modules=modules, size_bytes=size) if tail is None else Fuse(modules=modules, size_bytes=size, tail=tail)


def _read_kind(node: Node, _: Section, scope: Scope) -> str | None:
    computes = isinstance(node, Scalar) and node.value == Kind.COMPUTE
    hint = "remove the line: compute runs by itself" if computes else ""
    return read_choice(node, "`kind`", PLACEABLE, scope.findings, hint)


def _read_axis(node: Node, _: Section, scope: Scope) -> Axis | None:
    axis = read_choice(node, "`axis`", AXES, scope.findings)
    return None if axis is None else Axis(axis)


def _read_dtype(node: Node, _: Section, scope: Scope) -> str | None:
    return read_choice(node, "`dtype`", WIRE_DTYPES, scope.findings)


def _read_when(node: Node, _: Section, scope: Scope) -> When | None:
    when = read_choice(node, "`when`", WHENS, scope.findings)
    return None if when is None else When(when)


_READERS: Final[Mapping[str, Callable[[Node, Section, Scope], Any]]] = MappingProxyType(
    {
        "after": _read_after,
        "lane": _read_lane,
        "fuse": _read_fuse,
        "chunks": lambda node, _, scope: read_number(node, CHUNKS, scope),
        "dtype": _read_dtype,
        "when": _read_when,
        "kind": _read_kind,
        "axis": _read_axis,
    }
)
