"""A plan as JSON and back. Places in the schedule's file are left out: equal plans have equal JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from commplan.errors import CommplanError, PlanError
from commplan.language import validate_table
from commplan.language.modules import Module, ModuleTable
from commplan.language.source import shown
from commplan.ops import Axis, Kind, OpId, Section, When
from commplan.plan.model import Backwards, Buffer, BufferKind, Hook, LaneInfo, OpStep, Plan, Step, WaitStep
from commplan.plan.validate import problems

FORMAT: Final = "commplan.plan"
VERSION: Final = 1

T = TypeVar("T")


def to_json(plan: Plan) -> str:
    """`plan` as one line of JSON, keys in fixed order."""
    # Parts become plain data as they are written: all of it at once is more objects than the plan itself.
    return json.dumps(plan, default=lambda part: _PARTS[type(part)](part))


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "schedule": plan.schedule,
        "params": dict(plan.params),
        "modules": plan.modules,
        "lanes": plan.lanes,
        "hooks": plan.hooks,
        "buffers": plan.buffers,
    }


def _module_json(module: Module) -> dict[str, Any]:
    return module.model_dump(mode="json")


def _lane_json(lane: LaneInfo) -> dict[str, Any]:
    return {"name": lane.name, "priority": lane.priority, "own_communicator": lane.own_communicator}


def _hook_json(hook: Hook) -> dict[str, Any]:
    return {"section": hook.section, "n": hook.n, "module": hook.module, "steps": hook.steps}


def buffer_json(buffer: Buffer) -> dict[str, Any]:
    """A buffer as plain data; that it lives in every backward goes without saying."""
    data = {
        "kind": buffer.kind,
        "first": buffer.first,
        "last": buffer.last,
        "size_bytes": buffer.size_bytes,
        "born": buffer.born,
        "freed": buffer.freed,
    }
    return data if buffer.backwards is Backwards.EVERY else {**data, "backwards": buffer.backwards}


def _step_json(step: Step) -> dict[str, Any]:
    order = {"after": [str(op) for op in step.after], "waits": [str(op) for op in step.waits]}
    if isinstance(step, WaitStep):
        return order
    return {
        "op": str(step.op),
        "kind": step.kind,
        "axis": step.axis,
        "lane": step.lane,
        "communicator": step.communicator,
        **order,
        "dtype": step.dtype,
        "when": step.when,
    }


_PARTS: Final[Mapping[type, Callable[[Any], dict[str, Any]]]] = MappingProxyType(
    {
        Plan: _plan_json,
        ModuleTable: dict,
        Module: _module_json,
        LaneInfo: _lane_json,
        Hook: _hook_json,
        OpStep: _step_json,
        WaitStep: _step_json,
        Buffer: buffer_json,
    }
)
"""Part of a plan -> it as an object of JSON, whose values may be parts in turn."""


def from_json(text: str) -> Plan:
    """The plan that `text` spells.

    Raises:
        PlanError: if it is not the JSON of a plan, or the plan is not valid.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError([f"not JSON: {error}"]) from error
    try:
        plan = _plan(_Value(data, "plan"))
    except RecursionError as error:
        raise PlanError(["not a plan: nested too deep"]) from error
    found = problems(plan)
    if found:
        raise PlanError(found)
    return plan


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of the JSON and where it stands; reading it as another type than it has is a `PlanError`."""

    data: Any
    path: str

    def fault(self, expected: str) -> PlanError:
        shown = json.dumps(self.data)
        return PlanError([f"{self.path}: expected {expected}, not {shown if len(shown) <= 40 else shown[:37] + '...'}"])

    def record(self, *keys: str) -> dict[str, _Value]:
        """An object with exactly these keys."""
        if not isinstance(self.data, dict):
            raise self.fault("an object")
        wrong = [*(f"{key!r} is missing" for key in keys if key not in self.data)]
        wrong += [f"{key!r} is not known" for key in self.data if key not in keys]
        if wrong:
            raise PlanError([f"{self.path}: {', '.join(wrong)}"])
        return {key: _Value(self.data[key], f"{self.path}.{key}") for key in keys}

    def items(self) -> Iterator[_Value]:
        if not isinstance(self.data, list):
            raise self.fault("a list")
        return (_Value(item, f"{self.path}[{n}]") for n, item in enumerate(self.data))

    def text(self) -> str:
        if not isinstance(self.data, str):
            raise self.fault("a string")
        return self.data

    def integer(self) -> int:
        if not isinstance(self.data, int) or isinstance(self.data, bool):
            raise self.fault("an integer")
        return self.data

    def flag(self) -> bool:
        if not isinstance(self.data, bool):
            raise self.fault("true or false")
        return self.data

    def made(self, make: Callable[[str], T], expected: str) -> T:
        """What `make` makes of a string."""
        try:
            return make(self.text())
        except ValueError as error:
            raise self.fault(expected) from error

    def op(self) -> OpId:
        return self.made(OpId.parse, "the name of an op, as AR_6, AR_3-6 or AR_6[1/4]")


def _plan(value: _Value) -> Plan:
    if not isinstance(value.data, dict) or value.data.get("format") != FORMAT:
        raise PlanError([f"it has no `format` {FORMAT}"])
    if value.data.get("version") != VERSION:
        written = shown(str(value.data.get("version", "none")))
        raise PlanError([f"it has the `version` {written}, and only {VERSION} is read: compile its schedule again"])
    fields = value.record("format", "version", "schedule", "params", "modules", "lanes", "hooks", "buffers")
    params = fields["params"]
    if not isinstance(params.data, dict):
        raise params.fault("an object")
    try:
        modules = validate_table(fields["modules"].data, "plan.modules")
    except CommplanError as error:
        raise PlanError([str(error)]) from error
    return Plan(
        schedule=fields["schedule"].text(),
        params=tuple((name, _Value(number, f"plan.params.{name}").integer()) for name, number in params.data.items()),
        modules=modules,
        lanes=tuple(_lane(lane) for lane in fields["lanes"].items()),
        hooks=tuple(_hook(hook) for hook in fields["hooks"].items()),
        buffers=tuple(_buffer(buffer) for buffer in fields["buffers"].items()),
    )


def _lane(value: _Value) -> LaneInfo:
    fields = value.record("name", "priority", "own_communicator")
    return LaneInfo(fields["name"].text(), fields["priority"].text(), fields["own_communicator"].flag())


def _hook(value: _Value) -> Hook:
    fields = value.record("section", "n", "module", "steps")
    section = fields["section"].made(Section, "pre_backward, post_backward or root")
    steps = tuple(_step(step) for step in fields["steps"].items())
    return Hook(section, fields["n"].integer(), fields["module"].integer(), steps)


def _step(value: _Value) -> Step:
    if isinstance(value.data, dict) and "op" not in value.data:
        fields = value.record("after", "waits")
        return WaitStep(_ops(fields["after"]), _ops(fields["waits"]))
    fields = value.record("op", "kind", "axis", "lane", "communicator", "after", "waits", "dtype", "when")
    axis, dtype = fields["axis"], fields["dtype"]
    return OpStep(
        op=fields["op"].op(),
        kind=fields["kind"].made(Kind, "a kind of op"),
        axis=None if axis.data is None else axis.made(Axis, "a mesh axis"),
        lane=fields["lane"].text(),
        communicator=fields["communicator"].text(),
        after=_ops(fields["after"]),
        waits=_ops(fields["waits"]),
        dtype=None if dtype.data is None else dtype.text(),
        when=fields["when"].made(When, "every or last_backward"),
    )


def _ops(value: _Value) -> tuple[OpId, ...]:
    return tuple(op.op() for op in value.items())


def _buffer(value: _Value) -> Buffer:
    restricted = isinstance(value.data, dict) and "backwards" in value.data
    fields = value.record("kind", "first", "last", "size_bytes", "born", "freed", *["backwards"] * restricted)
    return Buffer(
        kind=fields["kind"].made(BufferKind, "a kind of buffer"),
        first=fields["first"].integer(),
        last=fields["last"].integer(),
        size_bytes=fields["size_bytes"].integer(),
        born=fields["born"].integer(),
        freed=fields["freed"].integer(),
        backwards=fields["backwards"].made(Backwards, "every, earlier or last") if restricted else Backwards.EVERY,
    )
