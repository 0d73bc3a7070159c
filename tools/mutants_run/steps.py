"""The items of a plan's JSON: what an executor does that knows hooks, lanes and waits, and what the steps declare beside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mutants_run.reading import BUILT_IN, REDUCTIONS
from mutants_run.world import AXIS_OF, Item, World, Wrong

NAME = re.compile(r"(?P<family>\w+?)_(?P<first>\d+)(?:-(?P<last>\d+))?(?:\[(?P<piece>\d+)/(?P<pieces>\d+)\])?")


def items(data: Mapping[str, Any], world: World) -> list[Item]:
    """Everything in the order of issue.

    Raises:
        Wrong: a step is none that a plan can hold.
    """
    own = {lane["name"] for lane in data["lanes"] if lane["own_communicator"]}
    found: list[Item] = []
    begun = list(world.need)
    for hook in data["hooks"]:
        section, n = hook["section"], hook["n"]
        while begun and _has_begun(begun[0], section, n, world):
            found.append(Item(f"backward of {begun[0]}", "compute", "begin", units=(begun.pop(0),)))
        is_compute = section == "post_backward"
        kind, units = ("compute", (n,)) if is_compute else ("", ())
        found.append(Item(f"compute_{n}" if is_compute else f"{section} {n}", "compute", kind, units=units))
        for number, step in enumerate(hook["steps"]):
            if "op" in step:
                found.append(_op(step, world, own))
            else:
                found.append(
                    Item(f"wait {section} {n} {number}", "compute", starts_after=step["waits"], promised=step["after"])
                )
    _check_ops(found)
    return found


def _has_begun(unit: int, section: str, n: int, world: World) -> bool:
    """Whether the backward of a unit has begun when a hook opens: its own hook before backward is over."""
    hooks = world.hooks()
    here = next(place for place, hook in enumerate(hooks) if hook[:2] == (section, n))
    return hooks.index(next(h for h in hooks if h[:2] == ("pre_backward", world.need.index(unit)))) < here


def _op(step: Mapping[str, Any], world: World, own: set[str]) -> Item:
    name, kind, axis, lane = step["op"], step["kind"], step["axis"], step["lane"]
    match = NAME.fullmatch(name)
    if match is None or kind not in AXIS_OF or BUILT_IN.get(match["family"], kind) != kind:
        raise Wrong(f"{name} is no {kind}")
    first = int(match["first"])
    last, piece, pieces = int(match["last"] or first), int(match["piece"] or 0), int(match["pieces"] or 1)
    order = world.order(kind)
    if not first <= last < len(order) or piece >= pieces or (kind == "apply" and pieces > 1):
        raise Wrong(f"{name} is not there")
    units = tuple(order[n] for n in range(first, last + 1))
    if any(not world.units[unit].needs(kind) or world.units[unit].axes != world.units[units[0]].axes for unit in units):
        raise Wrong(f"{name} is for modules that do not need it, or not together")
    if (axis is None) is not (kind == "apply") or (axis and lane == "compute"):
        raise Wrong(f"{name} over {axis} on {lane}")
    channel = f"{axis}@{lane}" if axis and lane in own else axis or ""
    if step["communicator"] != channel:
        raise Wrong(f"{name} is on communicator {step['communicator']}")
    if step["when"] != "every" and kind not in REDUCTIONS:
        raise Wrong(f"{name} runs {step['when']}")
    return Item(name, lane, kind, axis, units, piece, pieces, channel, step["waits"], step["after"], step["when"])


def _check_ops(found: list[Item]) -> None:
    """Pieces of an op are all there, in order and alike, and a family means one thing."""
    kinds: dict[str, str] = {}
    for family, pieces in _ops(found):
        if kinds.setdefault(family, pieces[0].kind) != pieces[0].kind:
            raise Wrong(f"{family} has two meanings")
        if [item.piece for item in pieces] != list(range(pieces[0].pieces)):
            raise Wrong(f"{pieces[0].name}: not each piece once, in order")
        if len({(item.units, item.pieces, item.lane, item.kind, item.when) for item in pieces}) > 1:
            raise Wrong(f"{pieces[0].name}: pieces that are not alike")


def _ops(found: list[Item]) -> Iterator[tuple[str, list[Item]]]:
    by_op: dict[tuple[str, str], list[Item]] = {}
    for item in found:
        match = NAME.fullmatch(item.name) if item.kind in AXIS_OF else None
        if match is not None:
            by_op.setdefault((match["family"], match["first"]), []).append(item)
    yield from ((family, pieces) for (family, _), pieces in by_op.items())
