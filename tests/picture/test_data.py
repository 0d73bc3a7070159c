"""What a report embeds is what was simulated and measured, in whatever form it is packed."""

from __future__ import annotations

import json
from itertools import chain, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.language import library
from commplan.ops import COMPUTE_LANE
from commplan.picture import content
from commplan.picture.compact import _column, _steps, _visible, compact, unit_of
from commplan.picture.content import stops
from commplan.picture.panels import WAIT, Panel, measured, predicted
from commplan.simulate import Simulated, limits, memory, report
from tests.picture.given import profile, run_like, simulated


def column(packed: Any) -> list[int]:
    if isinstance(packed, list):
        return packed
    runs = packed["runs"]
    return list(chain.from_iterable(repeat(value, times) for value, times in zip(runs[::2], runs[1::2], strict=True)))


def sums(packed: Any) -> list[int]:
    found, total = [], 0
    for step in column(packed):
        total += step
        found.append(total)
    return found


def unpack(text: str) -> list[dict[str, Any]]:
    """The panels, read as the docstring of `compact` says."""
    data = json.loads(text)
    strings, sizes, unit_s = data["strings"], data["sizes"], data["unit_s"]
    panels = []
    for packed in data["panels"]:
        of = {
            key: sums(value) if key in ("what", "begin", "limit", "hook") else column(value)
            for key, value in packed["bars"].items()
        }
        bars = []
        for index in range(len(of["begin"])):
            name, kind, modules, size = data["whats"][of["what"][index]]
            lag = of["lag"][index]
            bars.append(
                {
                    "name": strings[name],
                    "kind": strings[kind],
                    "modules": strings[modules],
                    "size_bytes": sizes[size],
                    "lane": strings[packed["lanes"][of["lane"][index]]],
                    "begin_s": of["begin"][index] * unit_s,
                    "end_s": (of["begin"][index] + of["ran"][index]) * unit_s,
                    "issued_s": None if lag < 0 else (of["begin"][index] - lag) * unit_s,
                    "limit": strings[of["limit"][index]],
                    "exposed_s": of["exposed"][index] * unit_s,
                    "why": tuple(strings[at] for at in packed["why"].get(str(index), [])),
                    "place": (strings[of["hook"][index]], strings[of["line"][index]]),
                }
            )
        points = [
            (at * unit_s, sizes[size]) for at, size in zip(sums(packed["memory"][0]), column(packed["memory"][1]), strict=True)
        ]
        panels.append(packed | {"bars": bars, "memory": points, "duration_s": packed["duration"] * unit_s, "unit_s": unit_s})
    return panels


def packed(panel: Panel, top_reasons: int | None = None) -> dict[str, Any]:
    (found,) = unpack(compact([panel], [0], None, top_reasons))
    return found


@pytest.mark.parametrize("schedule", library.names())
def test_ops_are_those_of_the_simulation(schedule: str) -> None:
    one = simulated(schedule)
    found = packed(predicted(one))
    near = found["unit_s"]
    bars = {bar["name"]: bar for bar in found["bars"] if bar["limit"]}
    assert len(bars) == len(one.ops)
    for ran, limit in zip(one.ops, limits(one), strict=True):
        bar = bars[str(ran.op)]
        assert (bar["lane"], bar["limit"]) == (ran.lane, limit)
        times = (ran.begin_s, ran.end_s, ran.issued_s)
        assert (bar["begin_s"], bar["end_s"], bar["issued_s"]) == pytest.approx(times, abs=near)
    assert found["duration_s"] == pytest.approx(one.duration_s, abs=near)
    waits = [(bar["begin_s"], bar["end_s"]) for bar in found["bars"] if bar["kind"] == WAIT]
    assert len(waits) == len(one.waits)
    for wait, stood in zip(waits, one.waits, strict=True):
        assert wait == pytest.approx((stood.begin_s, stood.end_s), abs=near)


@pytest.mark.parametrize("schedule", library.names())
def test_exposed_time_is_the_reports_and_each_has_a_reason(schedule: str) -> None:
    one = simulated(schedule)
    panel = predicted(one)
    told = report(one)
    for lane in told.lanes:
        exposed_s = sum(bar.exposed_s for bar in panel.bars if bar.lane == lane)
        assert exposed_s == pytest.approx(told.exposed_s(lane), abs=1e-12)
    assert sum(stop.seconds for stop in stops(panel)) == pytest.approx(told.compute_wait_s(), abs=1e-12)
    bars = packed(panel)["bars"]
    assert all(bool(bar["why"]) == (bar["exposed_s"] > 0) for bar in bars)
    assert any(bar["why"] for bar in bars)


@pytest.mark.parametrize("schedule", ["eager_apply", "chunked", "prefetch_overlap", "shrunken_tail"])
def test_memory_peaks_where_the_plan_says(schedule: str) -> None:
    one = simulated(schedule)
    found = packed(predicted(one))
    points = memory(one)
    assert max(size for _, size in found["memory"]) == max(point.size_bytes for point in points) == found["peak"]
    assert found["memory"][-1][1] == 0
    assert found["declared"] == one.plan.peak_bytes


def test_reasons_of_the_longest_are_kept_where_not_all_have_room() -> None:
    panel = predicted(simulated("blocking"))
    kept = [bar for bar in packed(panel, 3)["bars"] if bar["why"]]
    assert len(kept) == 3
    assert min(bar["exposed_s"] for bar in kept) >= sorted(bar.exposed_s for bar in panel.bars)[-4] - 1e-9


def test_a_measured_run_is_told_from_its_begin_on() -> None:
    one = simulated("pipelined_allreduce")
    run = run_like(one, rank=3, times=2.0)
    found = packed(measured(run))
    by_name = {str(ran.op): ran for ran in one.ops}
    ops = [bar for bar in found["bars"] if bar["name"] in by_name and bar["kind"] != WAIT]
    assert len(ops) == len(run.report.ops)
    for bar in ops:
        ran = by_name[bar["name"]]
        expected = (2 * ran.begin_s, 2 * ran.end_s, 2 * ran.issued_s)
        assert (bar["begin_s"], bar["end_s"], bar["issued_s"]) == pytest.approx(expected, abs=found["unit_s"])
    compute = [bar for bar in found["bars"] if bar["lane"] == COMPUTE_LANE]
    assert sum(bar["end_s"] - bar["begin_s"] for bar in compute) == pytest.approx(2 * one.duration_s, abs=1e-6)
    assert (found["measured"], found["peak"]) == (1, run.report.peak_bytes)


def test_an_op_that_ran_twice_has_the_reasons_of_each_time() -> None:
    one = simulated("blocking", 1)
    run = run_like(one, times=1.0)
    again = [
        type(op)(op.op, op.lane, op.begin_s + one.duration_s, op.end_s + one.duration_s, None) for op in list(run.report.ops)
    ]
    both = type(run.report)(**{**_fields(run.report), "ops": [*run.report.ops, *again], "end_s": 100 + 2 * one.duration_s})
    bars = [bar for bar in measured(type(run)(0, {}, 0.0, both)).bars if bar.name == "AR_0" and bar.kind != WAIT]
    assert [bar.exposed_s > 0 for bar in bars] == [True, False]
    assert [bool(bar.reasons) for bar in bars] == [True, False]


def _fields(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__dataclass_fields__}


@given(st.lists(st.integers(-3, 3)))
def test_a_column_is_read_as_it_was_written(values: list[int]) -> None:
    assert column(_column(values)) == values
    assert sums(_column(_steps(values))) == values


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9))).map(lambda points: sorted(points, key=lambda p: p[0])))
def test_what_is_left_of_a_curve_has_its_heights_and_holds_as_it_did(points: list[tuple[int, int]]) -> None:
    found = _visible(points)
    for time in {at for at, _ in points}:
        before, after = ([size for at, size in curve if at == time] for curve in (points, found))
        assert len(after) <= 2
        assert (max(after), after[-1]) == (max(before), before[-1])


@given(st.floats(1e-9, 1e6))
def test_times_are_kept_to_a_ten_millionth_of_the_longest(longest_s: float) -> None:
    assert longest_s * 0.99e-8 <= unit_of(longest_s) <= longest_s * 1.01e-7


def test_nothing_ends_the_script_element() -> None:
    one = simulated("blocking", 1)
    run = run_like(one)
    run.report.ops[0].op = "</script><!--"
    text = compact([measured(run)], [0], 1, None)
    assert "<" not in text
    assert any(bar["name"] == "</script><!--" for bar in unpack(text)[0]["bars"])


def of(*simulations: Simulated) -> list[str]:
    return [section.name for section in content(simulations, [], profile()).sections]


def test_schedules_are_the_fastest_first_as_measured_if_all_were() -> None:
    one, other = simulated("blocking"), simulated("overlapped_allreduce")
    runs = [run_like(one, times=1.0), run_like(other, times=9.0)]
    names = [[section.name for section in content([one, other], ran, profile()).sections] for ran in (runs, runs[1:])]
    assert names == [["blocking", "overlapped_allreduce"], ["overlapped_allreduce", "blocking"]]
    assert of(*map(simulated, ("blocking", "pipelined_allreduce", "overlapped_allreduce"))) == [
        "overlapped_allreduce",
        "pipelined_allreduce",
        "blocking",
    ]
