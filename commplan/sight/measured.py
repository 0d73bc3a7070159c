"""Measured backwards as processes of a trace, one a rank, laid beside each other by their wall clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from commplan.ops import COMPUTE_LANE
from commplan.plan.model import OpStep, Plan
from commplan.plan.wire import members_of, wire_bytes
from commplan.sight.intervals import Interval
from commplan.sight.report import step_of
from commplan.sight.runs import Run
from commplan.sight.trace import IN_FLIGHT, MEMORY, Process, Slice, levels


def processes(runs: Sequence[Run]) -> list[Process]:
    """The runs by rank; time 0 is when the first of them began."""
    if not runs:
        return []
    first = min(runs, key=lambda run: run.report.begin_s + run.wall_s)

    def origin_s(run: Run) -> float:
        # Of differences: a wall clock's time has but a few tenths of a microsecond in a float.
        late_s = run.report.begin_s - first.report.begin_s + run.wall_s - first.wall_s
        return run.report.begin_s - max(late_s, 0.0)

    return [_process(run, origin_s(run)) for run in sorted(runs, key=lambda run: run.rank)]


def _process(run: Run, origin_s: float) -> Process:
    """Tracks: compute, with what it waits for where it stands still, and each lane. `origin_s`: time 0 on the run's clock."""
    report, plan = run.report, run.report.plan
    tracks: dict[str, list[Slice]] = {COMPUTE_LANE: list(_compute(run))}
    place: dict[str, tuple[str, int]] = {}
    steps = {} if plan is None else {str(step.op): step for step in plan.steps if isinstance(step, OpStep)}
    members = None if plan is None else members_of(plan)
    moved = []
    for op in sorted(report.ops, key=lambda op: (op.begin_s, op.end_s)):
        track = tracks.setdefault(op.lane, [])
        # An op that runs twice in a backward is in its plan once.
        place.setdefault(op.op, (op.lane, len(track)))
        details: dict[str, object] = {}
        if (step := steps.get(op.op)) is not None and members is not None:
            details["modules"] = ", ".join(module.name for module in members(step))
            moved.append((op.begin_s, op.end_s, wire_bytes(step, members(step))))
        if op.issued_s is not None:
            details["queued, ms"] = round((op.begin_s - op.issued_s) * 1e3, 3)
        track.append(Slice(op.op, op.begin_s, op.end_s, details))
    arrows = [
        (place[str(op)], place[name]) for name, step in steps.items() for op in step.after if name in place and str(op) in place
    ]
    shifted = {track: [_shifted(one, origin_s) for one in slices] for track, slices in tracks.items()}
    counters = {IN_FLIGHT: levels(moved), MEMORY: [(at_s, float(size_bytes)) for at_s, size_bytes in report.memory]}
    # Memory is counted from a moment before the first hook on.
    since = {name: [(max(at_s - origin_s, 0.0), value) for at_s, value in of] for name, of in counters.items()}
    return Process(run.name, shifted, arrows, since)


def _compute(run: Run) -> Iterator[Slice]:
    """Compute between the waits; a backward knows no more of it."""
    report = run.report
    at_s = report.begin_s
    for wait in sorted(report.compute_waits, key=lambda wait: wait.begin_s):
        if wait.begin_s > at_s:
            yield Slice("compute", at_s, wait.begin_s)
        yield Slice(_waited(report.plan, wait), wait.begin_s, wait.end_s)
        at_s = wait.end_s
    if report.end_s > at_s:
        yield Slice("compute", at_s, report.end_s)


def _waited(plan: Plan | None, wait: Interval) -> str:
    """What a wait was for, by the number of its step."""
    number = step_of(wait)
    if number is None:
        return f"wait: {wait.op or 'end of root'}"
    if plan is None:
        return f"wait: step {number}"
    return f"wait: {', '.join(map(str, plan.steps[number].waits))}"


def _shifted(one: Slice, by_s: float) -> Slice:
    return replace(one, begin_s=one.begin_s - by_s, end_s=one.end_s - by_s)
