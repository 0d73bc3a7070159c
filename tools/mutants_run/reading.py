"""The lines of a schedule from the plain data of its file, and what the language does not allow in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mutants_run.world import AXIS_OF, GATHER, Wrong

SECTIONS = ("pre_backward", "post_backward", "root")
BUILT_IN = {"AG": GATHER, "RS": "reduce_scatter", "AR": "all_reduce", "apply": "apply"}
LANE_OF = {GATHER: "shard", "reduce_scatter": "shard", "all_reduce": "replicate", "apply": "compute"}
REDUCTIONS = ("reduce_scatter", "all_reduce")
ALLOWED = {
    GATHER: {"after", "lane", "fuse", "chunks"},
    "reduce_scatter": {"after", "lane", "fuse", "chunks", "dtype", "when"},
    "all_reduce": {"after", "lane", "fuse", "chunks", "dtype", "when"},
    "apply": {"after", "lane"},
}
ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
NAME = re.compile(r"(?P<family>[A-Za-z]\w*?)_(?P<index>n|\*|<n(?:(?P<sign>[+-])(?P<distance>\w+))?>)")


@dataclass(frozen=True)
class Ref:
    """An op by name: `offset` to n, or every module."""

    family: str
    offset: int
    every: bool = False


@dataclass(frozen=True)
class Line:
    """A line. A wait has no `ref`, and waits for `after`."""

    ref: Ref | None
    after: tuple[Ref, ...]
    kind: str = ""
    axis: str | None = None
    lane: str = "compute"
    pieces: int = 1
    modules: int | None = None
    size_bytes: int | None = None
    tail: int = 0
    itemsize_bytes: int = 4
    when: str = "every"


@dataclass(frozen=True)
class Schedule:
    """Lines by section, and lanes with a communicator of their own."""

    lines: Mapping[str, tuple[Line, ...]]
    own: frozenset[str]


def read(data: Mapping[str, Any], params: Mapping[str, int]) -> Schedule:
    """The schedule that plain data spells.

    Raises:
        Wrong: the language does not allow it.
    """
    lanes = data.get("lanes") or {}
    reader = _Reader(params, {"compute", "shard", "replicate", *lanes})
    lines = {section: tuple(reader.line(item, section) for item in data.get(section) or []) for section in SECTIONS}
    if not any(lines.values()):
        raise Wrong("a schedule without lines")
    own = frozenset(name for name, lane in lanes.items() if lane and lane.get("communicator") == "own")
    return Schedule(lines, own)


@dataclass(frozen=True)
class _Reader:
    params: Mapping[str, int]
    lanes: set[str]

    def line(self, item: Any, section: str) -> Line:
        """One item of a section."""
        ((name, value),) = item.items() if isinstance(item, Mapping) else [(item, None)]
        if name == "wait":
            return Line(None, self.refs(value, section))
        ref = self.ref(name, section)
        if ref.every:
            raise Wrong(f"{name} places every module in one line")
        return self.op(ref, value or {}, section)

    def op(self, ref: Ref, attributes: Mapping[str, Any], section: str) -> Line:
        """A line that places an op."""
        kind = BUILT_IN.get(ref.family, attributes.get("kind"))
        if ref.family == "compute" or kind not in AXIS_OF:
            raise Wrong(f"{ref.family} is no op that can be placed")
        allowed = set(ALLOWED[kind])
        if ref.family not in BUILT_IN:
            allowed |= {"kind"} | ({"axis"} if kind != "apply" else set())
        if not allowed >= set(attributes):
            raise Wrong(f"{', '.join(sorted(set(attributes) - allowed))} on {ref.family}")
        lane = attributes.get("lane", LANE_OF[kind])
        if lane not in self.lanes or (lane == "compute" and kind != "apply"):
            raise Wrong(f"{ref.family} on lane {lane}")
        fuse = attributes.get("fuse", {})
        if "fuse" in attributes and ("modules" in fuse) is ("bytes" in fuse):
            raise Wrong("a bucket with no limit, or two")
        _may_stand(kind, ref.offset, section)
        return Line(
            ref,
            self.refs(attributes.get("after", []), section),
            kind,
            attributes.get("axis", AXIS_OF[kind]),
            lane,
            self.number(attributes.get("chunks", 1)),
            self.number(fuse["modules"]) if "modules" in fuse else None,
            self.size(fuse["bytes"]) if "bytes" in fuse else None,
            self.number(fuse.get("tail", 0)),
            ITEMSIZE_BYTES[attributes.get("dtype", "fp32")],
            attributes.get("when", "every"),
        )

    def refs(self, value: Any, section: str) -> tuple[Ref, ...]:
        """One reference or several."""
        return tuple(self.ref(name, section) for name in (value if isinstance(value, list) else [value]))

    def ref(self, name: str, section: str) -> Ref:
        """One reference."""
        match = NAME.fullmatch(name)
        if match is None:
            raise Wrong(f"{name!r} is not the name of an op")
        distance = match["distance"]
        offset = 0 if distance is None else self.number(int(distance) if distance.isdecimal() else distance)
        if section == "root" and distance is not None:
            raise Wrong(f"{name} has an offset in root")
        return Ref(match["family"], -offset if match["sign"] == "-" else offset, match["index"] == "*")

    def number(self, value: Any) -> int:
        """A number, or that of a param."""
        found = self.params.get(value) if isinstance(value, str) else value
        if not isinstance(found, int):
            raise Wrong(f"{value} is no number")
        return found

    def size(self, value: Any) -> int:
        """A size in bytes."""
        match = re.fullmatch(r"(\d+) ?([KMG]i?B)?", str(value))
        return int(match[1]) * UNITS[match[2] or ""] if match else self.number(value)


def _may_stand(kind: str, offset: int, section: str) -> None:
    """Raise `Wrong` where the table of hooks says that a section may not place an op."""
    allowed = {
        "pre_backward": offset >= 0 if kind == GATHER else offset < 0,
        "post_backward": kind != GATHER and offset <= 0,
        "root": True,
    }
    if not allowed[section]:
        raise Wrong(f"{kind} of n{offset:+d} in {section}")
