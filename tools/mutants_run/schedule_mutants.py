"""Slips of all kinds in a schedule, as plain data; and the text of one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from mutants_run.reading import ALLOWED, BUILT_IN, LANE_OF, NAME, SECTIONS

Data = dict[str, Any]
Mutants = Iterator[Data]
FAMILIES = ("compute", "RS", "AR", "apply")
FUSES = ({"modules": 2}, {"modules": 3, "tail": 1}, {"bytes": "4MiB"})
CHUNKS = (2, 3)
OTHER = "other"
"""A free family name for ops that get another kind or axis."""


def normal(data: Mapping[str, Any]) -> Data:
    """The same schedule with each line as {op: attributes} or {"wait": [refs]}, and each `after` as a list."""

    def listed(value: Any) -> list[str]:
        return list(value) if isinstance(value, list) else [value]

    def line(item: Any) -> Data:
        ((name, value),) = item.items() if isinstance(item, Mapping) else [(item, None)]
        if name == "wait":
            return {"wait": listed(value)}
        return {name: {key: listed(v) if key == "after" else v for key, v in (value or {}).items()}}

    return {**data, **{section: [line(item) for item in data.get(section) or []] for section in SECTIONS}}


def text(data: Data) -> str:
    """A schedule as YAML, a line for each line."""
    shown = [f"{key}: {json.dumps(value)}" for key, value in data.items() if key not in SECTIONS]
    for section in SECTIONS:
        if data[section]:
            shown.append(f"{section}:")
            shown += [f"  - {_line(line)}" for line in data[section]]
    return "\n".join(shown) + "\n"


def _line(line: Data) -> str:
    ((name, value),) = line.items()
    return f"{name}: {json.dumps(value)}".replace('"', "") if value else str(name)


def _copy(data: Data) -> Data:
    return {**data, **{section: [_line_copy(line) for line in data[section]] for section in SECTIONS}}


def _line_copy(line: Data) -> Data:
    ((name, value),) = line.items()
    if isinstance(value, list):
        return {name: list(value)}
    return {name: {key: list(v) if key == "after" else v for key, v in value.items()}}


def _lines(data: Data) -> Iterator[tuple[str, int, str, Any]]:
    for section in SECTIONS:
        for place, line in enumerate(data[section]):
            ((name, value),) = line.items()
            yield section, place, name, value


def _with(data: Data, section: str, place: int, *lines: Data) -> Data:
    """The schedule with other lines (or none) in place of one."""
    found = _copy(data)
    found[section][place : place + 1] = [_line_copy(line) for line in lines]
    return found


def _ops(data: Data) -> Iterator[tuple[str, int, str, Data]]:
    yield from ((section, place, name, value) for section, place, name, value in _lines(data) if name != "wait")


def drop(data: Data) -> Mutants:
    """Leave an op out."""
    yield from (_with(data, section, place) for section, place, _, _ in _ops(data))


def drop_a_wait(data: Data) -> Mutants:
    """Leave a wait out, or one of the ops that it names."""
    for section, place, name, value in _lines(data):
        if name == "wait":
            yield _with(data, section, place)
            for gone in range(len(value)) if len(value) > 1 else ():
                yield _with(data, section, place, {"wait": [*value[:gone], *value[gone + 1 :]]})


def duplicate(data: Data) -> Mutants:
    """Write a line twice: as it is, and an op under another name."""
    for section, place, name, value in _lines(data):
        line = {name: value}
        yield _with(data, section, place, line, line)
        if name != "wait":
            yield _with(data, section, place, line, _renamed(name, value, {}))


def _renamed(name: str, attributes: Data, changes: Data) -> Data:
    """An op under a free name, of the same kind if nothing else is said."""
    _, index = _parts(name)
    kind = changes.get("kind") or _kind(name, attributes)
    rest = {key: value for key, value in attributes.items() if key in ALLOWED[kind]}
    rest.setdefault("lane", LANE_OF[_kind(name, attributes)])
    if kind != "apply" and rest["lane"] == "compute":
        del rest["lane"]
    return {f"{OTHER}_{index}": {"kind": kind, **rest, **changes}}


def _kind(name: str, attributes: Data) -> str:
    """What an op does."""
    kind: str = attributes.get("kind") or BUILT_IN[_parts(name)[0]]
    return kind


def _parts(name: str) -> tuple[str, str]:
    match = NAME.fullmatch(name)
    assert match is not None, name
    return match["family"], match["index"]


def swap(data: Data) -> Mutants:
    """Let two lines of a hook change places."""
    for section in SECTIONS:
        for one, other in combinations(range(len(data[section])), 2):
            found = _copy(data)
            lines = found[section]
            lines[one], lines[other] = lines[other], lines[one]
            yield found


def shift(data: Data, params: Mapping[str, int]) -> Mutants:
    """Shift one index by one, either way."""
    for section, place, name, value in _lines(data):
        for by in (-1, 1):
            if name == "wait":
                for at, ref in enumerate(value):
                    yield from (_with(data, section, place, {name: _put(value, at, r)}) for r in _shifted(ref, by, params))
                continue
            yield from (_with(data, section, place, {other: value}) for other in _shifted(name, by, params))
            for at, ref in enumerate(value.get("after", ())):
                for other in _shifted(ref, by, params):
                    yield _with(data, section, place, {name: value | {"after": _put(value["after"], at, other)}})


def _put(refs: list[str], at: int, ref: str) -> list[str]:
    return [*refs[:at], ref, *refs[at + 1 :]]


def _shifted(ref: str, by: int, params: Mapping[str, int]) -> Iterator[str]:
    match = NAME.fullmatch(ref)
    if match is None or match["index"] == "*":
        return
    distance = match["distance"] or "0"
    offset = params.get(distance) if distance in params else int(distance)
    assert offset is not None
    offset = (-offset if match["sign"] == "-" else offset) + by
    yield f"{match['family']}_n" if offset == 0 else f"{match['family']}_<n{offset:+d}>"


def drop_an_after(data: Data) -> Mutants:
    """Leave out `after`, or one op of it."""
    for section, place, name, value in _ops(data):
        refs = value.get("after", [])
        for gone in range(len(refs)):
            rest = [*refs[:gone], *refs[gone + 1 :]]
            attributes = {key: v for key, v in value.items() if key != "after"}
            yield _with(data, section, place, {name: attributes | ({"after": rest} if rest else {})})


def retarget(data: Data) -> Mutants:
    """Let an `after` or a wait name another op of the same module, or all of them."""
    placed = {_parts(name)[0] for _, _, name, _ in _ops(data)} | set(FAMILIES)
    for section, place, name, value in _lines(data):
        refs = value if name == "wait" else value.get("after", [])
        for at, ref in enumerate(refs):
            family, index = _parts(ref)
            others = [f"{other}_{index}" for other in sorted(placed - {family})] + ([f"{family}_*"] if index != "*" else [])
            for other in others:
                changed = _put(refs, at, other)
                yield _with(data, section, place, {name: changed if name == "wait" else value | {"after": changed}})


def change_lane(data: Data) -> Mutants:
    """Run an op on another lane: built-in, declared, or one more with a communicator of its own."""
    lanes = ["compute", "shard", "replicate", *(data.get("lanes") or {})]
    declared = {**data, "lanes": {**(data.get("lanes") or {}), "more": None, "apart": {"communicator": "own"}}}
    for section, place, name, value in _ops(data):
        for lane in lanes:
            if lane != value.get("lane"):
                yield _with(data, section, place, {name: value | {"lane": lane}})
        for lane in ("more", "apart"):
            yield _with(declared, section, place, {name: value | {"lane": lane}})


def change_axis(data: Data) -> Mutants:
    """Run a collective over the other axis. That takes a free name; what names the op follows."""
    for section, place, name, value in _ops(data):
        kind = _kind(name, value)
        for axis in ("shard", "replicate") if kind != "apply" else ():
            yield _followed(data, section, place, name, _renamed(name, value, {"axis": axis}))


def change_kind(data: Data) -> Mutants:
    """Let an op do something else. That takes a free name; what names the op follows."""
    for section, place, name, value in _ops(data):
        was = _kind(name, value)
        for kind in sorted(ALLOWED.keys() - {was}):
            yield _followed(data, section, place, name, _renamed(name, value, {"kind": kind}))
        built_in = next(family for family, kind in BUILT_IN.items() if kind == was)
        for other in sorted(BUILT_IN.keys() - {built_in}):
            yield _with(data, section, place, {f"{other}_{_parts(name)[1]}": value})


def _followed(data: Data, section: str, place: int, name: str, line: Data) -> Data:
    """The schedule with a renamed op, named so everywhere."""
    family = _parts(name)[0]
    found = _with(data, section, place, line)
    for _, _, other, value in _lines(found):
        refs = value if other == "wait" else value.get("after", [])
        refs[:] = [re.sub(f"^{family}_", f"{OTHER}_", ref) for ref in refs]
    return found


def move(data: Data) -> Mutants:
    """Move a line to another hook, to its top and to its bottom; to root without offsets, too."""
    for section, place, name, value in _lines(data):
        for other in SECTIONS:
            if other == section:
                continue
            lines = [{name: value}]
            if other == "root":
                lines.append(_at_n({name: value}))
            for line in lines:
                for where in (0, len(data[other])):
                    found = _with(data, section, place)
                    found[other].insert(where, _line_copy(line))
                    yield found


def _at_n(line: Data) -> Data:
    """A line with every index made n."""

    def plain(ref: str) -> str:
        family, index = _parts(ref)
        return ref if index == "*" else f"{family}_n"

    ((name, value),) = line.items()
    if name == "wait":
        return {name: [plain(ref) for ref in value]}
    return {plain(name): {key: [plain(ref) for ref in v] if key == "after" else v for key, v in value.items()}}


def apply_early(data: Data) -> Mutants:
    """Apply at the top and at the bottom of the hook, this module or one before, after the AR, the RS or nothing."""
    for section, place, name, value in _ops(data):
        if _kind(name, value) != "apply":
            continue
        family = _parts(name)[0]
        rest = {key: v for key, v in value.items() if key != "after"}
        before = [_parts(ref)[0] for ref in value.get("after", [])]
        for index in ("n", "<n-1>", "<n-2>"):
            for after in ([], ["RS"], before):
                line = {f"{family}_{index}": rest | ({"after": [f"{f}_{index}" for f in after]} if after else {})}
                for hook in ("pre_backward", "post_backward"):
                    moved = _with(data, section, place)
                    for where in {0, len(moved[hook])}:
                        found = _copy(moved)
                        found[hook].insert(where, _line_copy(line))
                        yield found


def apply_twice(data: Data) -> Mutants:
    """Apply once more, under the same name and under another, in the hook and in root."""
    for _, _, name, value in _ops(data):
        if _kind(name, value) != "apply":
            continue
        for other in ("post_backward", "root"):
            for line in ({name: value}, _renamed(name, value, {})):
                for shown in (line, _at_n(line)):
                    found = _copy(data)
                    found[other].append(_line_copy(shown))
                    yield found


def change_fuse(data: Data) -> Mutants:
    """Bucket an op in another way, or not at all."""
    yield from _attribute(data, "fuse", FUSES, ALLOWED)


def change_chunks(data: Data) -> Mutants:
    """Split an op in another way, or not at all."""
    yield from _attribute(data, "chunks", CHUNKS, ALLOWED)


def change_when(data: Data) -> Mutants:
    """Run a reduction in the last backward only, or in every one."""
    yield from _attribute(data, "when", ("last_backward", "every"), ALLOWED)


def _attribute(data: Data, key: str, values: tuple[Any, ...], allowed: Mapping[str, set[str]]) -> Mutants:
    for section, place, name, value in _ops(data):
        if key in value:
            yield _with(data, section, place, {name: {k: v for k, v in value.items() if k != key}})
        kind = _kind(name, value)
        for other in values if key in allowed[kind] else ():
            if other != value.get(key):
                yield _with(data, section, place, {name: value | {key: other}})


OPERATORS: Mapping[str, Callable[[Data, Mapping[str, int]], Mutants]] = {
    "drop an op": lambda data, _: drop(data),
    "duplicate": lambda data, _: duplicate(data),
    "swap two": lambda data, _: swap(data),
    "shift an index": shift,
    "drop an after": lambda data, _: drop_an_after(data),
    "retarget an after or a wait": lambda data, _: retarget(data),
    "change the lane": lambda data, _: change_lane(data),
    "change the axis": lambda data, _: change_axis(data),
    "move to another hook": lambda data, _: move(data),
    "drop a wait": lambda data, _: drop_a_wait(data),
    "apply early": lambda data, _: apply_early(data),
    "apply twice": lambda data, _: apply_twice(data),
    "change the kind": lambda data, _: change_kind(data),
    "change fuse": lambda data, _: change_fuse(data),
    "change chunks": lambda data, _: change_chunks(data),
    "change when": lambda data, _: change_when(data),
}
