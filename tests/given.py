"""What a schedule is checked with, from comments at its top that people read too:

    # modules: 4
    # modules: embed (shard), head (replicate, shard; 8x8, 248320x5120)
    # rank 0: a, b            (and so on; a table for each rank)
    # memory cap: 32MiB
    # in flight: 2            (of the collectives of a rank)

A module is spread over both axes, 2 ranks each, and has one fp32 parameter of 8x8, if nothing else is said.
"""

from __future__ import annotations

import re

from commplan import compiler
from commplan.errors import Violation
from commplan.language.fields import size_bytes
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis

MODULE = re.compile(r"(?P<name>\w+)(?: \((?P<axes>[^;)]*)(?:; (?P<shapes>[^)]*))?\))?(?:, |$)")


def table(text: str) -> int | ModuleTable:
    """A number of modules, or modules one by one."""
    if text.isdecimal():
        return int(text)
    found = list(MODULE.finditer(text))
    assert "".join(match[0] for match in found) == text, text
    modules = []
    for match in found:
        axes = {Axis(axis): 2 for axis in (match["axes"] or "replicate, shard").split(", ")}
        shapes = [tuple(map(int, shape.split("x"))) for shape in (match["shapes"] or "8x8").split(", ")]
        parameters = tuple(Parameter(name=f"weight_{i}", shape=shape) for i, shape in enumerate(shapes))
        modules.append(Module(name=match["name"], parameters=parameters, axes=axes))
    return ModuleTable(modules=tuple(modules))


def findings(text: str, schedule: object = None) -> tuple[Violation, ...]:
    """What `check` finds in a schedule (in `text`, if it is not somewhere else), with what the comments of `text` give."""
    subject = text if schedule is None else schedule
    said = dict(re.findall(r"^# ([\w ]+): (.+)$", text, re.MULTILINE))
    cap = size_bytes(said["memory cap"]) if "memory cap" in said else None
    ranks = [table(said[key]) for key in sorted(key for key in said if re.fullmatch(r"rank \d", key))]
    if ranks:
        in_flight = int(said.get("in flight", "1"))
        return compiler.check_ranks(subject, ranks, in_flight=in_flight, memory_cap_bytes=cap)  # type: ignore[arg-type]
    modules = table(said["modules"]) if "modules" in said else None
    return compiler.check(subject, modules, memory_cap_bytes=cap)  # type: ignore[arg-type]
