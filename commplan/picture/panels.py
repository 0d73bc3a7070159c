"""One backward as it is drawn, predicted or measured alike: bars on lanes, memory, figures and reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePath

from commplan.errors import Span
from commplan.language.modules import Module
from commplan.ops import COMPUTE_LANE
from commplan.plan.model import OpStep, Plan
from commplan.plan.wire import members_of, wire_bytes
from commplan.sight.figures import OpReport, Report, describe_backward
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport, step_of
from commplan.sight.runs import Run
from commplan.simulate import Ran, Simulated, limits, memory, report

COMPUTE = "compute"
PACKING = "packing"
WAIT = "wait"
OTHER = "collective"
"""A collective whose plan is not known."""

FSDP2 = ("FSDP2", "")
"""The place of a wait that is not the plan's."""


@dataclass(frozen=True)
class Bar:
    """Something that ran on a lane, or (`WAIT`) compute that stood still. Seconds from the begin of backward.

    Attributes:
        kind: of an op its kind (`all_reduce`), or one of the words above.
        issued_s: when compute had reached the place where it was issued; None: not known.
        modules: the names of those that it covers.
        size_bytes: what it has to move.
        limit: what it could not begin before, in words; "" where that is not known.
        exposed_s: of it, compute stood still; `reasons` tell why.
        place: the hook that issues it, and the line of the schedule.
    """

    lane: str
    name: str
    kind: str
    begin_s: float
    end_s: float
    issued_s: float | None = None
    modules: tuple[str, ...] = ()
    size_bytes: int = 0
    limit: str = ""
    exposed_s: float = 0
    reasons: tuple[str, ...] = ()
    place: tuple[str, str] = ("", "")

    @property
    def is_op(self) -> bool:
        """Whether it is an op of the plan."""
        return self.kind not in (COMPUTE, PACKING, WAIT)


@dataclass(frozen=True)
class Panel:
    """One backward of one rank.

    Attributes:
        title: what tells it from others of its schedule: "predicted", or which rank.
        lanes: of its bars, compute first.
        bars: lane by lane, as they began.
        memory: from when on how many bytes of communication memory were alive.
        told: its figures, and each collective with reasons.
    """

    title: str
    is_measured: bool
    duration_s: float
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    memory: tuple[tuple[float, int], ...]
    told: Report
    plan: Plan | None

    @property
    def exposed(self) -> list[Bar]:
        """The ops that ran while compute stood still, the longest first."""
        return sorted((bar for bar in self.bars if bar.exposed_s > 0), key=lambda bar: -bar.exposed_s)


def predicted(simulated: Simulated) -> Panel:
    """A backward that was simulated."""
    plan, whole = simulated.plan, report(simulated)
    told = describe_backward(whole)
    places = _places(plan)
    table = plan.modules.modules
    bars = [_computed(ran, plan, places, table) for ran in simulated.compute]
    bars += [_wait_bar(whole, wait, places) for wait in whole.compute_waits]
    op_of = _Ops(plan, told.ops)
    bars += [
        replace(op_of.bar(str(ran.op), ran.lane, ran.begin_s, ran.end_s), issued_s=ran.issued_s, limit=limit)
        for ran, limit in zip(simulated.ops, limits(simulated), strict=True)
    ]
    points = [(point.begin_s, point.size_bytes) for point in memory(simulated)]
    return _panel("predicted", simulated.duration_s, bars, points, told, plan)


def measured(run: Run) -> Panel:
    """A backward that ran."""
    whole, plan = run.report, run.report.plan
    told = describe_backward(whole, run.rank)
    places = {} if plan is None else _places(plan)
    bars = list(_compute_between(whole, places))
    op_of = _Ops(plan, told.ops)
    for op in whole.ops:
        begin_s, end_s = op.begin_s - whole.begin_s, op.end_s - whole.begin_s
        issued_s = None if op.issued_s is None else op.issued_s - whole.begin_s
        bars.append(replace(op_of.bar(op.op, op.lane, begin_s, end_s), issued_s=issued_s))
    points = [(at_s - whole.begin_s, size_bytes) for at_s, size_bytes in whole.memory]
    return _panel(f"{run.name}, backward {whole.number}", whole.duration_s, bars, points, told, plan)


def _panel(
    title: str,
    duration_s: float,
    bars: Sequence[Bar],
    points: Sequence[tuple[float, int]],
    told: Report,
    plan: Plan | None,
) -> Panel:
    of_plan = [lane.name for lane in plan.lanes] if plan is not None else []
    lanes = tuple(dict.fromkeys([COMPUTE_LANE, *of_plan, *(bar.lane for bar in bars)]))
    row = {lane: at for at, lane in enumerate(lanes)}
    ordered = sorted(bars, key=lambda bar: (row[bar.lane], bar.begin_s, bar.end_s))
    return Panel(title, told.rank is not None, duration_s, lanes, tuple(ordered), tuple(points), told, plan)


class _Ops:
    """What is known of the ops of a backward beside their times. Ops that run twice are told of in their order."""

    def __init__(self, plan: Plan | None, told: Sequence[OpReport]) -> None:
        self._numbers: Mapping[str, int] = {}
        self._plan = plan
        if plan is not None:
            self._numbers = {str(step.op): number for number, step in enumerate(plan.steps) if isinstance(step, OpStep)}
            self._members: Callable[[OpStep], list[Module]] = members_of(plan)
            self._places = _places(plan)
        self._told: dict[str, list[OpReport]] = {}
        for one in reversed(told):
            self._told.setdefault(one.op, []).append(one)

    def bar(self, name: str, lane: str, begin_s: float, end_s: float) -> Bar:
        bar = Bar(lane, name, OTHER, begin_s, end_s)
        if self._told.get(name):
            told = self._told[name].pop()
            bar = replace(bar, exposed_s=told.exposed_s, reasons=told.reasons)
        number = self._numbers.get(name)
        if number is None or self._plan is None:
            return bar
        step = self._plan.steps[number]
        assert isinstance(step, OpStep)
        members = self._members(step)
        return replace(
            bar,
            kind=step.kind.value,
            modules=tuple(module.name for module in members),
            size_bytes=wire_bytes(step, members) if step.communicator else 0,
            place=self._places[number],
        )


def _computed(ran: Ran, plan: Plan, places: Mapping[int, tuple[str, str]], table: Sequence[Module]) -> Bar:
    """Compute of a module, or packing for an op."""
    if ran.module >= 0:
        name = table[ran.module].name or "(root)"
        return Bar(ran.lane, name, COMPUTE, ran.begin_s, ran.end_s, modules=(name,))
    step = plan.steps[ran.number]
    name = str(step.op) if isinstance(step, OpStep) else ""
    return Bar(ran.lane, name, PACKING, ran.begin_s, ran.end_s, place=places[ran.number])


def _compute_between(whole: BackwardReport, places: Mapping[int, tuple[str, str]]) -> Iterator[Bar]:
    """Waits, and compute between them: a backward knows no more of it."""
    at_s = whole.begin_s
    for wait in sorted(whole.compute_waits, key=lambda wait: wait.begin_s):
        if wait.begin_s > at_s:
            yield Bar(COMPUTE_LANE, "", COMPUTE, at_s - whole.begin_s, wait.begin_s - whole.begin_s)
        yield _wait_bar(whole, wait, places)
        at_s = max(at_s, wait.end_s)
    if whole.end_s > at_s:
        yield Bar(COMPUTE_LANE, "", COMPUTE, at_s - whole.begin_s, whole.end_s - whole.begin_s)


def _wait_bar(whole: BackwardReport, wait: Interval, places: Mapping[int, tuple[str, str]]) -> Bar:
    number = step_of(wait)
    name, place = wait.op, FSDP2
    if wait.op == "":
        name, place = "end of root", _ROOT
    elif number is not None and whole.plan is None:
        name, place = f"step {number}", ("", "")
    elif number is not None and whole.plan is not None:
        step = whole.plan.steps[number]
        name, place = ", ".join(map(str, step.waits or step.after)), places.get(number, _ROOT)
    return Bar(COMPUTE_LANE, name, WAIT, wait.begin_s - whole.begin_s, wait.end_s - whole.begin_s, place=place)


_ROOT = ("root", "")


def _places(plan: Plan) -> dict[int, tuple[str, str]]:
    """Each step's hook, and where in the schedule it is written."""
    table = plan.modules.modules
    hooks = [f"{hook}" if hook.module < 0 else f"{hook} ({table[hook.module].name or 'root'})" for hook in plan.hooks]
    named = chain.from_iterable(((name, step) for step in hook.steps) for name, hook in zip(hooks, plan.hooks, strict=True))
    return {number: (name, _line(step.span)) for number, (name, step) in enumerate(named)}


def _line(span: Span | None) -> str:
    return "" if span is None else f"{PurePath(span.file).name}:{span.line}"
