"""Traces of simulated backwards: what a viewer needs to show them."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import commplan
from commplan.language import library
from commplan.ops import Kind
from commplan.plan.model import Backwards, OpStep
from commplan.sight.trace import IN_FLIGHT, MEMORY, trace
from commplan.simulate import Costs, OpCost, Simulated, simulate
from commplan.simulate.tracing import process
from tests.sight.perfetto import open_trace

LANES = ["shard", "replicate"]
SECONDS = {Kind.ALL_GATHER: 2, Kind.REDUCE_SCATTER: 4, Kind.ALL_REDUCE: 8, Kind.APPLY: 1}


def run(schedule: str, num_modules: int = 7) -> Simulated:
    plan = commplan.compile(schedule, num_modules)
    ops = {step.op: OpCost(issue_s=0.5, latency_s=SECONDS[step.kind]) for step in plan.steps if isinstance(step, OpStep)}
    return simulate(plan, Costs([10] * num_modules, ops))


def events(*simulated: Simulated) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(trace([process(one) for one in simulated])))["traceEvents"]
    return found


def slices(of: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in of:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


@pytest.mark.parametrize("schedule", library.names())
def test_slices_of_one_track_follow_each_other(schedule: str) -> None:
    for track in slices(events(run(schedule))).values():
        ends = [event["ts"] + event["dur"] for event in track]
        assert all(end <= event["ts"] + 1e-3 for end, event in zip(ends, track[1:], strict=False))


@pytest.mark.parametrize("schedule", library.names())
def test_every_op_is_there_once_and_every_dependency_is_an_arrow_between_two(schedule: str) -> None:
    simulated = run(schedule)
    found = events(simulated)
    by_track = slices(found)
    steps = [step for step in simulated.plan.steps if isinstance(step, OpStep)]
    names = [event["name"] for track in by_track.values() for event in track]
    assert all(names.count(str(step.op)) == 1 for step in steps)

    def at(event: dict[str, Any]) -> str:
        here = by_track[event["pid"], event["tid"]]
        within = [s["name"] for s in here if s["ts"] <= event["ts"] < s["ts"] + s["dur"]]
        (name,) = within
        return str(name)

    begun = {event["id"]: at(event) for event in found if event["ph"] == "s"}
    ended = {event["id"]: at(event) for event in found if event["ph"] == "f"}
    drawn = {(begun[arrow], ended[arrow]) for arrow in begun}
    assert drawn == {(str(op), str(step.op)) for step in steps for op in step.after if op.family != "compute"}
    assert begun.keys() == ended.keys()


@pytest.mark.parametrize("schedule", library.names())
def test_counters_end_at_nothing_and_memory_reaches_its_peak(schedule: str) -> None:
    simulated = run(schedule)
    counted = defaultdict(list)
    for event in events(simulated):
        if event["ph"] == "C":
            counted[event["name"]].append(event["args"]["bytes"])
    assert counted[MEMORY][-1] == counted[IN_FLIGHT][-1] == 0
    assert min(counted[IN_FLIGHT]) == 0
    if all(buffer.backwards is Backwards.EVERY for buffer in simulated.plan.buffers):
        assert max(counted[MEMORY]) == simulated.plan.peak_bytes


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(library.names()), st.integers(0, 10**6))
def test_perfetto_shows_every_slice_and_every_arrow(schedule: str, seed: int) -> None:
    draw = random.Random(seed)
    plan = commplan.compile(schedule, 5)
    steps = [step for step in plan.steps if isinstance(step, OpStep)]
    # At least a microsecond, to any fraction of a nanosecond.
    ops = {step.op: OpCost(issue_s=draw.uniform(1e-6, 1e-5), latency_s=draw.uniform(1e-6, 1e-3)) for step in steps}
    simulated = simulate(
        plan, Costs([draw.uniform(1e-6, 1e-3) for _ in range(5)], ops, gather_s=[draw.uniform(1e-6, 1e-4)] * 5)
    )
    opened = open_trace(json.loads(json.dumps(trace([process(simulated, name) for name in ("a", "b")]))))
    assert opened.lost == []
    assert list(opened.processes.values()) == ["a", "b"]
    assert {shown.depth for shown in opened.slices} == {0}
    num_slices = len(simulated.ops) + len(simulated.compute) + len(simulated.waits)
    assert len(opened.slices) == 2 * num_slices
    expected = [(str(op), str(step.op)) for step in steps for op in step.after if op.family != "compute"]
    drawn = [(one.name, other.name) for one, other in opened.arrows]
    assert sorted(drawn) == sorted(expected * 2)
    lanes = set(opened.threads.values()) - {"compute"}
    assert lanes == {lane.name for lane in plan.lanes} - {"compute"}
    assert {name for _, name in opened.counters} >= {"communication memory bytes", "in flight bytes"}


def test_tracks_are_lanes_and_processes_are_named() -> None:
    found = events(run("blocking"), run("prefetch_overlap"))
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in found if e["ph"] == "M" and e["name"].endswith("_name")}
    assert (names[1, None], names[2, None]) == ("blocking", "prefetch_overlap")
    # The number of a process is that of its main thread, and no number is given twice.
    assert [[name for (pid, tid), name in names.items() if pid == p and tid] for p in (1, 2)] == [["compute", *LANES]] * 2
    threads = [(pid, tid) for pid, tid in names if tid is not None]
    assert [tid for pid, tid in threads if tid == pid] == [1, 2]
    assert len({tid for _, tid in threads}) == len(threads)
    ids = [event["id"] for event in found if event["ph"] == "s"]
    assert len(ids) == len(set(ids))


def test_where_compute_stands_still_it_says_for_what() -> None:
    waits = [e["name"] for track in slices(events(run("blocking", 2))).values() for e in track if e["name"].startswith("wait")]
    assert waits == ["wait: RS_0", "wait: AR_0", "wait: RS_1", "wait: AR_1"]


def test_no_arrow_ends_at_an_op_that_takes_no_time() -> None:
    plan = commplan.compile("overlapped_allreduce", 3)
    ops = {step.op: OpCost(latency_s=step.kind is not Kind.APPLY) for step in plan.steps if isinstance(step, OpStep)}
    found = trace([process(simulate(plan, Costs([1] * 3, ops)))])["traceEvents"]
    assert sum(event["ph"] == "f" for event in found) == 3
