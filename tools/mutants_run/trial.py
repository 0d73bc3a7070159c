"""Every mutant of one schedule before the oracle and before the checker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from commplan import compiler
from commplan.errors import PlanError, ScheduleError, Severity, Violation
from commplan.language import parse
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.language.spec import ScheduleSpec
from commplan.ops import Axis, Kind, OpId, Section, When
from commplan.plan import Hook, OpStep, Plan, WaitStep
from commplan.plan.buffers import buffers
from commplan.plan.order import step_order
from commplan.plan.serial import buffer_json
from mutants_run import buffer_mutants, oracle, plan_mutants, schedule_mutants
from mutants_run.world import Unit, World

COUNTS = (1, 2, 3, 5)
MORE_COUNTS = (4, *range(6, 25), 40, 80)
"""Tried where the checker, asked about every number of modules, refuses what is right for `COUNTS`."""

UNIFORM = tuple(World.of(*[Unit()] * count) for count in COUNTS)
MIXED = World.of(Unit(), Unit(("shard",)), Unit(("replicate",), resharded=False), Unit(()), Unit())
NESTED = World.of(*[Unit()] * 4, need=(3, 1, 0, 2))
WORLDS = (*UNIFORM, NESTED, MIXED)
PLAN_WORLDS = (World.of(Unit()), World.of(*[Unit()] * 3), MIXED)
MAX_PARAM = 4
"""Params are tried at their default and bounds as far as these are no larger, and at 2: no more modules are needed."""


@dataclass
class Row:
    """What became of the mutants of one operator on one form. Duplicates count once."""

    mutants: int = 0
    wrong: int = 0
    refused: int = 0
    missed: int = 0
    wrongly_refused: int = 0

    def add(self, other: Row) -> None:
        """Add the numbers of another row."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Result:
    """What became of the mutants of one schedule: rows by form and operator, and each mutant that oracle and checker do not
    agree on, told in full.
    """

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Add those of another schedule."""
        for key, row in other.rows.items():
            self.rows.setdefault(key, Row()).add(row)
        self.disagreements += other.disagreements


@dataclass(frozen=True)
class Verdict:
    """Why a mutant is wrong and why it is refused, if so, with one module table."""

    asked: str
    fault: str
    refusal: str


def table(world: World) -> ModuleTable:
    """The module table of a world."""
    modules = tuple(
        Module(
            name=f"module_{n}",
            parameters=(Parameter(name="weight", shape=(unit.numel,)),),
            axes={Axis(axis): 2 for axis in unit.axes},
            resharded_after_forward=unit.resharded,
        )
        for n, unit in enumerate(world.units)
    )
    return ModuleTable(modules=modules, need_order=world.need)


def _read(path: Path) -> dict[str, Any]:
    return schedule_mutants.normal(YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8-sig")))


def meaning(path: Path) -> str:
    """The schedule in a file without its name, comments and way of writing."""
    said = {key: value for key, value in sorted(_read(path).items()) if key not in ("name", "summary")}
    return re.sub(r"<n([+-]0)?>", "n", schedule_mutants.text(said))


def try_schedule(path: Path) -> Result:
    """Every mutant of the schedule in a file, and of its plans."""
    data = _read(path)
    bindings = list(_bindings(data))
    result = Result()
    seen = {schedule_mutants.text(data)}
    _judge(result, ("YAML", "none"), _schedule_verdicts(data, bindings), f"{path.stem} itself")
    for operator, mutants in schedule_mutants.OPERATORS.items():
        for mutant in mutants(data, bindings[0]):
            text = schedule_mutants.text(mutant)
            if text not in seen:
                seen.add(text)
                verdicts = _schedule_verdicts(mutant, bindings)
                _judge(result, ("YAML", operator), verdicts, f"{path.stem}, {operator}:\n{text}")
    for world in PLAN_WORLDS:
        result.add(_try_plan(path, bindings[0], world))
    return result


def _bindings(data: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Values of params: the defaults (as far as few modules show them), then bounds and 2, one at a time."""
    choices: dict[str, list[int]] = {}
    for name, value in (data.get("params") or {}).items():
        declared = value if isinstance(value, dict) else {"default": value}
        default: int = declared["default"]
        low, high = declared.get("min", default), declared.get("max", default)
        choices[name] = list(dict.fromkeys(v for v in (default, 2, low, high) if low <= v <= high and v <= MAX_PARAM))
    main = {name: numbers[0] for name, numbers in choices.items()}
    yield main
    for name, numbers in choices.items():
        yield from (main | {name: number} for number in numbers[1:])


def _judge(result: Result, key: tuple[str, str], verdicts: list[Verdict], told: str) -> None:
    """Count a mutant, and tell where oracle and checker disagree."""
    row = result.rows.setdefault(key, Row())
    row.mutants += 1
    row.wrong += any(v.fault for v in verdicts)
    row.refused += any(v.refusal for v in verdicts)
    missed = [v for v in verdicts if v.fault and not v.refusal]
    refused = [v for v in verdicts if v.refusal and not v.fault]
    row.missed += bool(missed)
    row.wrongly_refused += bool(refused)
    for what, found in (("wrong but accepted", missed), ("wrongly refused", refused)):
        if found:
            why = found[0].fault or found[0].refusal
            result.disagreements.append(f"{key[0]}, {what}, with {found[0].asked}: {why}\n  {told}")


def _schedule_verdicts(data: Mapping[str, Any], bindings: list[dict[str, int]]) -> list[Verdict]:
    """Oracle and checker on a schedule: for each world and values of params, and for every number of modules at once.

    What is right has to become a plan that is right, too.
    """
    found = []
    refusal = ""
    try:
        spec = parse(schedule_mutants.text(dict(data)))
    except ScheduleError as error:
        refusal = _shown(error.violations)
    for params in bindings:
        shown = "".join(f", {name}={value}" for name, value in params.items())
        for world in WORLDS:
            fault, refused = oracle.schedule_fault(data, params, world), refusal
            if not refused:
                plan, refused = _compiled(spec, world, params)
                if not fault and not refused:
                    fault = oracle.plan_fault(json.loads(plan), world)
            found.append(Verdict(f"{world}{shown}", fault, refused))
    params = bindings[0]
    fault = next(filter(None, (oracle.schedule_fault(data, params, world) for world in UNIFORM)), "")
    refused = refusal or _shown(compiler.check(spec, None, params))
    if refused and not fault:
        more = (oracle.schedule_fault(data, params, World.of(*[Unit()] * count)) for count in MORE_COUNTS)
        fault = next(filter(None, more), "")
    return [*found, Verdict("every number of modules", fault, refused)]


def _compiled(spec: ScheduleSpec, world: World, params: Mapping[str, int]) -> tuple[str, str]:
    """The plan as JSON, or why there is none."""
    try:
        return compiler.compile(spec, table(world), **params).to_json(), ""
    except ScheduleError as error:
        return "", _shown(error.violations)


def _shown(found: tuple[Violation, ...]) -> str:
    errors = [violation for violation in found if violation.severity is Severity.ERROR]
    return f"{errors[0].code} {errors[0].message}" if errors else ""


def _try_plan(path: Path, params: Mapping[str, int], world: World) -> Result:
    """Every mutant of the plan of a schedule for one world."""
    result = Result()
    modules = table(world)
    data = json.loads(compiler.compile(path, modules, **params).to_json())
    seen = {json.dumps(data)}
    _judge(result, ("plan", "none"), [_plan_verdict(data, world)], f"{path.stem} itself")
    for operator, mutants in plan_mutants.OPERATORS.items():
        for mutant in mutants(data):
            plan_mutants.settle(mutant)
            key = json.dumps(mutant)
            if key not in seen:
                seen.add(key)
                verdict = _plan_verdict(_with_buffers(mutant, modules), world)
                _judge(result, ("plan", operator), [verdict], f"{path.stem}, {operator}:\n{_changes(data, mutant)}")
    result.add(_try_buffers(data, f"{path.stem} with {world}"))
    return result


def _try_buffers(data: dict[str, Any], name: str) -> Result:
    """Every mutant of the memory that a plan declares: each that is not what the plan has is wrong, and no oracle is asked."""
    result = Result()
    right = json.dumps(data["buffers"])
    seen = {right}
    for operator, mutants in buffer_mutants.OPERATORS.items():
        for mutant in mutants(data):
            buffer_mutants.settle(mutant)
            key = json.dumps(mutant["buffers"])
            if key not in seen:
                seen.add(key)
                other = [buffer for buffer in mutant["buffers"] if buffer not in data["buffers"]]
                verdict = Verdict(name, "it is not what the steps take", _refusal(mutant))
                _judge(
                    result,
                    ("buffers", operator),
                    [verdict],
                    f"{operator}: {other or 'the same buffers, not as often or not in order'}",
                )
    return result


def _with_buffers(data: dict[str, Any], modules: ModuleTable) -> dict[str, Any]:
    """The plan with the memory that its steps take, so that it is refused for what they do or not at all. Where steps make
    no sense, that can't be told.
    """
    try:
        hooks = [_hook(hook) for hook in data["hooks"]]
        found = buffers(hooks, modules, step_order(hooks))
    except (KeyError, IndexError, ValueError):
        return data
    return {**data, "buffers": [buffer_json(buffer) for buffer in found]}


def _hook(data: Mapping[str, Any]) -> Hook:
    return Hook(Section(data["section"]), data["n"], data["module"], tuple(_step(step) for step in data["steps"]))


def _step(data: Mapping[str, Any]) -> OpStep | WaitStep:
    after, waits = (tuple(OpId.parse(name) for name in data[key]) for key in ("after", "waits"))
    if "op" not in data:
        return WaitStep(after, waits)
    axis = Axis(data["axis"]) if data["axis"] else None
    return OpStep(
        OpId.parse(data["op"]),
        Kind(data["kind"]),
        axis,
        data["lane"],
        data["communicator"],
        after,
        waits,
        data["dtype"],
        When(data["when"]),
    )


def _plan_verdict(data: dict[str, Any], world: World) -> Verdict:
    return Verdict(str(world), oracle.plan_fault(data, world), _refusal(data))


def _refusal(data: dict[str, Any]) -> str:
    """Why a plan is refused; "" if it is not."""
    try:
        Plan.from_json(json.dumps(data))
    except PlanError as error:
        return str(error)
    return ""


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The steps of a mutant, those that are not in the plan marked."""
    old = [step for hook in before["hooks"] for step in hook["steps"]]
    shown = []
    for hook in after["hooks"]:
        shown.append(f"    {hook['section']} {hook['n']}")
        for step in hook["steps"]:
            what = f"{step['op']} {step['kind']} {step['axis']} on {step['lane']}" if "op" in step else "wait"
            mark = " " if step in old else "*"
            shown.append(f"     {mark} {what}, after {step['after']}, waits {step['waits']}")
    return "\n".join(shown)
