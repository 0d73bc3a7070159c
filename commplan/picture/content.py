"""What a report tells: schedules, the fastest first, each as predicted, as measured, or as both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from commplan.language.modules import ModuleTable
from commplan.language.profiles import Profile
from commplan.ops import OpId
from commplan.picture.panels import FSDP2, WAIT, Bar, Panel, measured, predicted
from commplan.plan.model import Plan
from commplan.sight.figures import ALL_LANES
from commplan.sight.runs import Run
from commplan.simulate import Simulated, compute_alone


@dataclass(frozen=True)
class Difference:
    """One figure, predicted and measured, in seconds or (`is_bytes`) bytes."""

    name: str
    predicted: float
    measured: float
    is_bytes: bool = False


@dataclass(frozen=True)
class OpDifference:
    """One op, predicted and measured."""

    predicted: Bar
    measured: Bar

    @property
    def longer_s(self) -> float:
        """Seconds that it ran longer than predicted."""
        ran_s = [bar.end_s - bar.begin_s for bar in (self.predicted, self.measured)]
        return ran_s[1] - ran_s[0]


@dataclass(frozen=True)
class Stop:
    """Where compute stood still: a line of the schedule, or the end of root."""

    place: str
    what: str
    seconds: float
    num_times: int


@dataclass(frozen=True)
class Section:
    """One schedule for one model.

    Attributes:
        measured: a panel for each rank, the slowest first.
        alone_s: compute alone, under the profile.
        notes: what a reader has to know of it.
    """

    name: str
    plan: Plan | None
    predicted: Panel | None
    measured: tuple[Panel, ...] = ()
    alone_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All of it, what is looked at first in front."""
        return (*((self.predicted,) if self.predicted is not None else ()), *self.measured)

    @property
    def first(self) -> Panel:
        """What its figures are taken from where one is asked for."""
        return self.panels[0]

    @property
    def params(self) -> str:
        """Params with their values, as in `k=2`."""
        return "" if self.plan is None else ", ".join(f"{name}={value}" for name, value in self.plan.params)

    @property
    def declared_peak_bytes(self) -> int:
        """The most communication memory that the plan declares, in whatever backward of a step."""
        return self.first.told.declared_peak_bytes if self.plan is None else self.plan.peak_bytes

    @property
    def num_modules(self) -> int | None:
        """How many modules the plan is for."""
        return None if self.plan is None else len(self.plan.modules)

    def differences(self) -> list[Difference]:
        """Figures predicted against those of the slowest rank; none where it is not both."""
        if self.predicted is None or not self.measured:
            return []
        one, other = self.predicted, self.measured[0]
        lanes = [lane for lane in _exposed(one) if lane in _exposed(other)]
        return [
            Difference("backward", one.duration_s, other.duration_s),
            Difference("compute stood still", one.told.compute_wait_s, other.told.compute_wait_s),
            *(
                Difference("exposed, any lane" if lane == ALL_LANES else f"exposed, {lane}", _exposed(one)[lane], s)
                for lane, s in _exposed(other).items()
                if lane in lanes
            ),
            Difference(
                "peak of communication memory",
                one.told.peak_bytes,
                max(panel.told.peak_bytes for panel in self.measured),
                is_bytes=True,
            ),
        ]

    def op_differences(self) -> list[OpDifference]:
        """Ops as predicted and as the slowest rank ran them (of those that it ran twice, first), the farthest off in front."""
        if self.predicted is None or not self.measured:
            return []
        ran: dict[str, Bar] = {}
        for bar in self.measured[0].bars:
            if bar.is_op:
                ran.setdefault(bar.name, bar)
        pairs = [OpDifference(bar, ran[bar.name]) for bar in self.predicted.bars if bar.is_op and bar.name in ran]
        return sorted(pairs, key=lambda pair: -abs(pair.longer_s))


@dataclass(frozen=True)
class Content:
    """All of a report; sections are the fastest first, as measured if all were."""

    sections: tuple[Section, ...]
    profile: Profile | None = None
    memory_cap_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes on which collectives ran, of all sections."""
        panels = [panel for section in self.sections for panel in section.panels]
        return tuple(dict.fromkeys(lane.lane for panel in panels for lane in panel.told.lanes if lane.lane != ALL_LANES))

    @property
    def module_tables(self) -> list[ModuleTable]:
        """The models that schedules are for, each once."""
        return _distinct(section.plan.modules for section in self.sections if section.plan is not None)

    @property
    def is_predicted(self) -> bool:
        """Whether anything is."""
        return any(section.predicted is not None for section in self.sections)

    @property
    def is_measured(self) -> bool:
        """Whether anything is."""
        return any(section.measured for section in self.sections)


def content(
    simulated: Sequence[Simulated], runs: Sequence[Run], profile: Profile | None = None, memory_cap_bytes: int | None = None
) -> Content:
    """Schedules with the runs of the same plan; runs of no plan among `simulated` have sections of their own.

    Raises:
        CommplanError: the profile does not say what compute costs.
    """
    by_digest = {one.plan.digest: one for one in simulated}
    panels: dict[str, list[tuple[Run, Panel]]] = {}
    for run in runs:
        digest = "" if run.report.plan is None else run.report.plan.digest
        # A plan that was compiled here knows the lines of its schedule, one that was saved does not.
        plan = by_digest[digest].plan if digest in by_digest else run.report.plan
        panels.setdefault(digest, []).append((run, measured(replace(run, report=replace(run.report, plan=plan)))))
    sections = []
    for digest, one in by_digest.items():
        alone_s = None if profile is None else sum(compute_alone(one.plan, profile))
        ran = _slowest_first(panels.pop(digest, []))
        sections.append(Section(one.plan.schedule, one.plan, predicted(one), ran, alone_s))
    plans = [one.plan for one in by_digest.values()]
    for of_plan in panels.values():
        plan = of_plan[0][0].report.plan
        name = "a run without its plan" if plan is None else plan.schedule
        sections.append(Section(name, plan, None, _slowest_first(of_plan), notes=tuple(_other_plan(plan, plans))))
    # What was measured counts, where everything was.
    is_measured = all(section.measured for section in sections)
    ordered = sorted(sections, key=lambda one: (one.measured[0] if is_measured else one.first).duration_s)
    made = Content(tuple(ordered), profile, memory_cap_bytes)
    if len(made.module_tables) > 1:
        note = "These schedules are for different models, so their times and bytes are not comparable with one another."
        made = replace(made, notes=(note,))
    return made


def stops(panel: Panel) -> list[Stop]:
    """Where compute stood still, by line of the schedule and by what it waited for, the longest first."""
    found: dict[tuple[str, str], list[float]] = {}
    for bar in panel.bars:
        if bar.kind == WAIT:
            hook, line = bar.place
            section = hook.split(" ")[0]
            place = f"{section}, {line}" if line else section
            what = "its own all-gathers" if bar.place == FSDP2 else _families(bar.name)
            found.setdefault((place, what), []).append(bar.end_s - bar.begin_s)
    made = [Stop(place, what, sum(seconds), len(seconds)) for (place, what), seconds in found.items()]
    return sorted(made, key=lambda stop: -stop.seconds)


def _families(names: str) -> str:
    """`AR_3, AR_4` -> `AR`: what is waited for in one place, whatever the module."""
    families = dict.fromkeys(_family(name) for name in names.split(", ") if name)
    return ", ".join(families)


def _family(name: str) -> str:
    """Of an op; what is none stays as it is."""
    try:
        return OpId.parse(name).family
    except ValueError:
        return name


def _slowest_first(of: Sequence[tuple[Run, Panel]]) -> tuple[Panel, ...]:
    return tuple(panel for _, panel in sorted(of, key=lambda pair: (-pair[1].duration_s, pair[0].rank)))


def _exposed(panel: Panel) -> Mapping[str, float]:
    return {lane.lane: lane.exposed_s for lane in panel.told.lanes}


def _other_plan(plan: Plan | None, simulated: Sequence[Plan]) -> Iterator[str]:
    """Why a run is not beside a prediction of its schedule."""
    if plan is None:
        yield "This run was saved without its plan, so that nothing is known of its ops but their names and times."
        return
    for other in simulated:
        if other.schedule == plan.schedule:
            yield f"What ran is not the plan that was simulated, so they are not compared: {_unlike(plan, other)}."


def _unlike(plan: Plan, other: Plan) -> str:
    if len(plan.modules) != len(other.modules):
        return f"it is for {len(plan.modules)} modules, simulated were {len(other.modules)}"
    if plan.params != other.params:
        return "its params have other values"
    if plan.modules != other.modules:
        return "its modules have other names, sizes or meshes than those simulated"
    return "the schedule has been changed since"


def _distinct(tables: Iterable[ModuleTable]) -> list[ModuleTable]:
    """Each once; they have no hash."""
    found: list[ModuleTable] = []
    for table in tables:
        if not any(table is known or table == known for known in found):
            found.append(table)
    return found
