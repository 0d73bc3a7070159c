"""Slips of all kinds in the JSON of a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Data = dict[str, Any]
Mutants = Iterator[Data]
NAME = re.compile(r"(\w+?)_(\d+)(?:-(\d+))?(\[\d+/\d+\])?")
AXES = {"all_gather": "shard", "reduce_scatter": "shard", "all_reduce": "replicate", "apply": None}
FAMILY = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "apply": "apply"}


def _copy(data: Data) -> Data:
    found: Data = json.loads(json.dumps({"hooks": data["hooks"], "lanes": data["lanes"]}))
    return {**data, **found}


def _steps(data: Data) -> Iterator[tuple[int, int, Data]]:
    for h, hook in enumerate(data["hooks"]):
        yield from ((h, s, step) for s, step in enumerate(hook["steps"]))


def _step(data: Data, h: int, s: int) -> Data:
    step: Data = data["hooks"][h]["steps"][s]
    return step


def _ops(data: Data) -> Iterator[tuple[int, int, Data]]:
    yield from ((h, s, step) for h, s, step in _steps(data) if "op" in step)


def _names(data: Data) -> list[str]:
    return [step["op"] for _, _, step in _ops(data)]


def _numbers(name: str) -> tuple[str, int, int, str]:
    match = NAME.fullmatch(name)
    assert match is not None
    first = int(match[2])
    return match[1], first, int(match[3] or first), match[4] or ""


def _refer(data: Data, old: str, new: list[str]) -> None:
    """Let what names `old` name `new`."""
    for _, _, step in _steps(data):
        for key in ("after", "waits"):
            if old in step[key]:
                step[key] = list(dict.fromkeys(n for name in step[key] for n in (new if name == old else [name])))


def settle(data: Data) -> None:
    """Write again what follows from steps alone: communicators, and the lanes in use."""
    known = {lane["name"]: lane for lane in data["lanes"]}
    own = {name for name, lane in known.items() if lane["own_communicator"]}
    used = {"compute": None}
    for _, _, step in _ops(data):
        used[step["lane"]] = None
        step["communicator"] = (
            "" if step["axis"] is None else step["axis"] + (f"@{step['lane']}" if step["lane"] in own else "")
        )
    for _, _, step in _steps(data):
        used.setdefault(step.get("lane", "compute"))
    fresh = {"priority": "normal", "own_communicator": False}
    data["lanes"] = [known.get(name, {"name": name, **fresh}) for name in used]


def drop(data: Data) -> Mutants:
    """Leave an op out."""
    for h, s, _ in _ops(data):
        found = _copy(data)
        del found["hooks"][h]["steps"][s]
        yield found


def drop_a_wait(data: Data) -> Mutants:
    """Leave a wait of compute out, or something that a step waits for."""
    for h, s, step in _steps(data):
        if "op" not in step:
            found = _copy(data)
            del found["hooks"][h]["steps"][s]
            yield found
        for w in range(len(step["waits"])):
            found = _copy(data)
            del _step(found, h, s)["waits"][w]
            yield found


def duplicate(data: Data) -> Mutants:
    """Run a step twice; an op under the same name, and under another."""
    for h, s, step in _steps(data):
        found = _copy(data)
        found["hooks"][h]["steps"].insert(s + 1, dict(step))
        yield found
        if "op" in step:
            found = _copy(data)
            found["hooks"][h]["steps"].insert(s + 1, step | {"op": "other" + step["op"][step["op"].rindex("_") :]})
            yield found


def swap(data: Data) -> Mutants:
    """Let a step and one after it, in its hook or the next one, change places."""
    places = [(h, s) for h, s, _ in _steps(data)]
    for number, (h, s) in enumerate(places):
        for g, t in places[number + 1 : number + 4]:
            found = _copy(data)
            one, other = found["hooks"][h]["steps"], found["hooks"][g]["steps"]
            one[s], other[t] = other[t], one[s]
            yield found


def shift(data: Data) -> Mutants:
    """Shift one module number by one, either way: of an op, or of what a step waits for."""
    for h, s, step in _steps(data):
        for by in (-1, 1):
            if "op" in step:
                found = _copy(data)
                _step(found, h, s)["op"] = _shifted(step["op"], by)
                yield found
            for key in ("after", "waits"):
                for w, name in enumerate(step[key]):
                    found = _copy(data)
                    _step(found, h, s)[key][w] = _shifted(name, by)
                    yield found


def _shifted(name: str, by: int) -> str:
    family, first, last, piece = _numbers(name)
    first, last = max(0, first + by), max(0, last + by)
    return f"{family}_{first}{'' if first == last else f'-{last}'}{piece}"


def drop_an_after(data: Data) -> Mutants:
    """Leave out what an op is to come after, with and without the wait for it."""
    for h, s, step in _steps(data):
        for name in step["after"]:
            for keys in (("after",), ("after", "waits")):
                found = _copy(data)
                for key in keys:
                    _step(found, h, s)[key] = [other for other in step[key] if other != name]
                yield found


def retarget(data: Data) -> Mutants:
    """Let a step wait for another op, with and without saying so in `after`."""
    names = _names(data)
    for h, s, step in _steps(data):
        for w in range(len(step["waits"])):
            for other in names:
                for silent in (True, False):
                    found = _copy(data)
                    changed = _step(found, h, s)
                    old, changed["waits"][w] = changed["waits"][w], other
                    if silent:
                        changed["after"] = [name for name in changed["after"] if name != old]
                    if other != old:
                        yield found


def change_lane(data: Data) -> Mutants:
    """Run an op on another lane."""
    for h, s, step in _ops(data):
        for lane in ("compute", "shard", "replicate", "more"):
            if lane != step["lane"]:
                found = _copy(data)
                _step(found, h, s)["lane"] = lane
                yield found


def change_axis(data: Data) -> Mutants:
    """Run an op over another axis."""
    for h, s, step in _ops(data):
        for axis in ("shard", "replicate", None):
            if axis != step["axis"]:
                found = _copy(data)
                _step(found, h, s)["axis"] = axis
                yield found


def move(data: Data) -> Mutants:
    """Move a step to another hook, to its top and to its bottom."""
    for h, s, _ in _steps(data):
        for g, other in enumerate(data["hooks"]):
            for where in {0, len(other["steps"])} if g != h else ():
                found = _copy(data)
                found["hooks"][g]["steps"].insert(where, found["hooks"][h]["steps"].pop(s))
                yield found


def apply_early(data: Data) -> Mutants:
    """Apply right after the reduce-scatter, or first of all, waiting for what it waited for or for nothing."""
    for h, s, step in _ops(data):
        if step["kind"] != "apply":
            continue
        for g, t, other in [(0, 0, {}), *_ops(data)]:
            if other and (other["kind"] != "reduce_scatter" or g > h):
                continue
            for waits in (step["waits"], [], [other["op"]] if other else []):
                found = _copy(data)
                del found["hooks"][h]["steps"][s]
                found["hooks"][g]["steps"].insert(t + 1 if other else 0, step | {"waits": list(waits), "after": list(waits)})
                yield found


def apply_twice(data: Data) -> Mutants:
    """Apply once more at the end, under the same name and under another."""
    for _, _, step in _ops(data):
        if step["kind"] == "apply":
            for name in (step["op"], step["op"].replace("apply", "other")):
                found = _copy(data)
                found["hooks"][-1]["steps"].append(step | {"op": name})
                yield found


def change_kind(data: Data) -> Mutants:
    """Let an op do something else, under its name and under that of the kind."""
    for h, s, step in _ops(data):
        for kind, axis in AXES.items():
            if kind == step["kind"]:
                continue
            family, first, last, piece = _numbers(step["op"])
            renamed = f"{FAMILY[kind]}_{first}{'' if first == last else f'-{last}'}{piece}"
            for name in (step["op"], renamed, step["op"].replace(family, "other")):
                found = _copy(data)
                _step(found, h, s).update(kind=kind, axis=axis, op=name)
                if name != step["op"]:
                    _refer(found, step["op"], [name])
                yield found


def change_fuse(data: Data) -> Mutants:
    """Make one op of two neighbours, in the place of either; take a bucket apart; leave a member out."""
    ops = list(_ops(data))
    for h, s, step in ops:
        family, first, last, piece = _numbers(step["op"])
        if first < last and not piece:
            names = [f"{family}_{n}" for n in range(first, last + 1)]
            found = _copy(data)
            found["hooks"][h]["steps"][s : s + 1] = [step | {"op": name} for name in names]
            _refer(found, step["op"], names)
            yield found
            found = _copy(data)
            _step(found, h, s)["op"] = f"{family}_{first}{'' if first == last - 1 else f'-{last - 1}'}"
            _refer(found, step["op"], [_step(found, h, s)["op"]])
            yield found
        for g, t, other in ops:
            name, start, stop, rest = _numbers(other["op"])
            if piece or rest or name != family or start != last + 1:
                continue
            whole = f"{family}_{first}-{stop}"
            both = {key: list(dict.fromkeys([*step[key], *other[key]])) for key in ("after", "waits")}
            for kept, gone in (((g, t), (h, s)), ((h, s), (g, t))):
                found = _copy(data)
                _step(found, *kept).update(op=whole, **both)
                del found["hooks"][gone[0]]["steps"][gone[1]]
                for old in (step["op"], other["op"]):
                    _refer(found, old, [whole])
                yield found


def change_chunks(data: Data) -> Mutants:
    """Split an op in two, named by both pieces or by one; leave a piece out."""
    for h, s, step in _ops(data):
        _, _, _, piece = _numbers(step["op"])
        if piece:
            continue
        pieces = [f"{step['op']}[{j}/2]" for j in range(2)]
        for named in (pieces, pieces[1:], pieces[:1]):
            found = _copy(data)
            found["hooks"][h]["steps"][s : s + 1] = [step | {"op": name} for name in pieces]
            _refer(found, step["op"], named)
            yield found
        found = _copy(data)
        _step(found, h, s)["op"] = pieces[0]
        _refer(found, step["op"], pieces[:1])
        yield found


def change_when(data: Data) -> Mutants:
    """Run an op in the last backward only, or in every one."""
    for h, s, step in _ops(data):
        found = _copy(data)
        _step(found, h, s)["when"] = "every" if step["when"] != "every" else "last_backward"
        yield found


OPERATORS: Mapping[str, Callable[[Data], Mutants]] = {
    "drop an op": drop,
    "duplicate": duplicate,
    "swap two": swap,
    "shift an index": shift,
    "drop an after": drop_an_after,
    "retarget an after or a wait": retarget,
    "change the lane": change_lane,
    "change the axis": change_axis,
    "move to another hook": move,
    "drop a wait": drop_a_wait,
    "apply early": apply_early,
    "apply twice": apply_twice,
    "change the kind": change_kind,
    "change fuse": change_fuse,
    "change chunks": change_chunks,
    "change when": change_when,
}
