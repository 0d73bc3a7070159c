"""What a schedule declares before its lines: params and lanes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from commplan.errors import Related, Span
from commplan.language.fields import (
    Entry,
    Range,
    read_choice,
    read_entries,
    read_integer,
    read_known,
)
from commplan.language.nodes import Node, Scalar
from commplan.language.refs import NAME_PATTERN
from commplan.language.source import Findings, shown
from commplan.language.spec import Lane, Param
from commplan.language.uses import Use
from commplan.ops import BUILT_IN_LANES, KIND_OF_FAMILY, WIRE_DTYPES, Axis, Kind, When

PARAM_RANGE: Final = Range("a param", 0, 2**63 - 1)
PARAM_KEYS: Final = ("default", "min", "max")
NAME_FORM: Final = "a name is made of letters, digits and underscores, a letter first"
LANE_FORM: Final = "as in `outer: {priority: high}` or `outer: {}`"
_OWN: Final = "write `communicator: own`, or remove it: without it the lane shares the communicator of the axis"
LANE_KEYS: Final = ("priority", "communicator")
PRIORITIES: Final = MappingProxyType({"high": "", "normal": ""})
COMMUNICATORS: Final = MappingProxyType({"own": ""})

# A param of one of these names would read as something else, or could not be passed to `compile` and `attach`.
RESERVED: Final = frozenset(
    {"n", "wait", "after", "lane", "fuse", "chunks", "dtype", "when", "kind", "axis", "modules", "bytes", "tail", "for"}
    | {
        "version",
        "name",
        "summary",
        "params",
        "lanes",
        "schedule",
        "model",
        "priority",
        "communicator",
        "own",
        "high",
        "normal",
    }
    | {"pre_forward", "pre_backward", "post_backward", "root"}
    | set(BUILT_IN_LANES)
    | set(KIND_OF_FAMILY)
    | set(WIRE_DTYPES)
    | {str(word) for words in (Axis, Kind, When) for word in words}
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A param as declared; a bound that was not written is None."""

    name: str
    default: int
    minimum: int | None
    maximum: int | None
    span: Span

    def bounded(self, uses: list[Use], findings: Findings) -> Param | None:
        """The param, with the lower bound that its uses ask for where none was written."""
        least = max((use.allowed.least for use in uses), default=0)
        param = Param(
            name=self.name,
            default=self.default,
            minimum=least if self.minimum is None else self.minimum,
            maximum=self.maximum,
            span=self.span,
        )
        before = len(findings.violations)
        _check_default(param, findings)
        for use in uses:
            for bound in (self.minimum, self.maximum):
                if bound is not None and not use.allowed.least <= bound <= use.allowed.most:
                    wrong = f"{use.allowed.what} is {use.allowed.least} to {use.allowed.most}, but {self.name} may be {bound}"
                    nearest = (
                        f"write `{'min' if bound == self.minimum else 'max'}: {_within(bound, use.allowed)}` for {self.name}"
                    )
                    findings.add("CP021", wrong, use.span, nearest, (Related("declared here", self.span),))
        return param if len(findings.violations) == before else None


def _within(number: int, allowed: Range) -> int:
    return min(max(number, allowed.least), allowed.most)


def _check_default(param: Param, findings: Findings) -> None:
    low, high = param.minimum, param.maximum
    if high is not None and low > high:
        wrong = f"the bounds of {param.name} hold no number: min {low}, max {high}"
        findings.add("CP021", wrong, param.span, f"write `min: {high}, max: {low}`")
    elif param.default < low or (high is not None and param.default > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        findings.add(
            "CP021",
            f"the default of {param.name} is {param.default}, out of its bounds: {bounds}",
            param.span,
            f"write `default: {low if param.default < low else high}`",
        )


def read_params(node: Node, lanes: frozenset[str], findings: Findings) -> dict[str, Declared | None]:
    """Params by name; None for one with a fault that was reported."""
    params: dict[str, Declared | None] = {}
    for name, entry in (read_entries(node, "`params`", findings, "as in `params: {k: 2}`") or {}).items():
        sound = _check_param_name(name, entry.key.span, lanes, findings)
        declared = _read_param(entry, findings)
        params[name] = declared if sound else None
    return params


def _check_param_name(name: str, at: Span, lanes: frozenset[str], findings: Findings) -> bool:
    if not re.fullmatch(NAME_PATTERN, name):
        findings.add("CP014", f"{shown(name)} cannot name a param", at, NAME_FORM)
        return False
    if name in RESERVED or name in lanes:
        what = "a lane" if name in lanes else "the index of a module" if name == "n" else "a word of the language"
        findings.add("CP022", f"{name} already means {what}", at, f"choose another name for the param, as in `my_{name}`")
        return False
    return True


def _read_param(entry: Entry, findings: Findings) -> Declared | None:
    name, value = entry.key.value, entry.value
    if isinstance(value, Scalar):
        default = read_integer(value, PARAM_RANGE, findings)
        return None if default is None else Declared(name, default, None, None, entry.key.span)
    before = len(findings.violations)
    what = f"the param {shown(name)[1:-1]}"
    fields = read_known(value, what, PARAM_KEYS, findings, f"as in `{shown(name)[1:-1]}: {{default: 2, min: 1, max: 8}}`")
    if fields is None:
        return None
    numbers = {key: read_integer(field.value, PARAM_RANGE, findings) for key, field in fields.items()}
    if "default" not in fields:
        usual = next((number for number in (numbers.get("min"), numbers.get("max")) if number is not None), 2)
        findings.add("CP008", f"{what} has no `default`", entry.key.span, f"add one, as in `default: {usual}`")
    default = numbers.get("default")
    if default is None or len(findings.violations) > before:
        return None
    return Declared(name, default, numbers.get("min"), numbers.get("max"), entry.key.span)


def read_lanes(node: Node, findings: Findings) -> dict[str, Lane | None]:
    """Lanes by name; None for one with a fault that was reported."""
    entries = read_entries(node, "`lanes`", findings, "as in `lanes: {outer: {priority: high}}`") or {}
    return {name: _read_lane(entry, findings) for name, entry in entries.items()}


def _read_lane(entry: Entry, findings: Findings) -> Lane | None:
    name, at = entry.key.value, entry.key.span
    before = len(findings.violations)
    if name in BUILT_IN_LANES:
        hint = f"remove it, or declare one of another name, as in `my_{name}: {{priority: high}}`"
        findings.add("CP025", f"the lane {name} exists already and cannot be changed", at, hint)
    elif not re.fullmatch(NAME_PATTERN, name):
        findings.add("CP014", f"{shown(name)} cannot name a lane", at, NAME_FORM)
    empty = isinstance(entry.value, Scalar) and entry.value.is_null
    fields = {} if empty else read_known(entry.value, "a lane", LANE_KEYS, findings, LANE_FORM)
    priority: str | None = "normal"
    own = False
    if fields and "priority" in fields:
        priority = read_choice(fields["priority"].value, "`priority`", PRIORITIES, findings)
    if fields and "communicator" in fields:
        own = read_choice(fields["communicator"].value, "`communicator`", COMMUNICATORS, findings, _OWN) is not None
    if priority is None or len(findings.violations) > before:
        return None
    return Lane(name=name, priority=priority, own_communicator=own, span=at)
