"""The figures of reports against counting ticks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commplan.execute.peers import Begins, begins_by_group, last_arrivals
from commplan.sight.explain import Explainer
from commplan.sight.figures import ALL_LANES, Arrivals, describe_backward
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport, stats

TICKS = 24
LANES = ("shard", "replicate", "comm")

spans = st.lists(st.tuples(st.integers(0, TICKS - 1), st.integers(0, 8)), max_size=6)
lanes = st.fixed_dictionaries(dict.fromkeys(LANES, spans))


@st.composite
def apart(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Spans one after another, as the waits of one thread are."""
    cuts = sorted(draw(st.lists(st.integers(0, TICKS), max_size=8)))
    return [(begin, end - begin) for begin, end in zip(cuts[::2], cuts[1::2], strict=False)]


def ticks(of: list[tuple[int, int]]) -> set[int]:
    return {tick for begin, length in of for tick in range(begin, begin + length)}


def report_of(of_lane: dict[str, list[tuple[int, int]]], waits: list[tuple[int, int]]) -> BackwardReport:
    ops = [Interval(f"{lane}_{i}", lane, b, b + n) for lane, of in of_lane.items() for i, (b, n) in enumerate(of)]
    return BackwardReport(0, TICKS, ops, [Interval("", "compute", b, b + n) for b, n in waits], 5, 7, 1)


@given(lanes, spans)
def test_every_moment_is_hidden_exposed_or_idle(
    of_lane: dict[str, list[tuple[int, int]]], waits: list[tuple[int, int]]
) -> None:
    report = report_of(of_lane, waits)
    whole = set(range(TICKS)).union(ticks(waits), *(ticks(of) for of in of_lane.values()))
    # Only the end can be later than that of the host, where nothing has to fill what lies between.
    whole = set(range(max(whole) + 1))
    everything = [span for of in of_lane.values() for span in of]
    figures = stats(report)
    assert figures["commplan/backward_s"] == len(whole)
    assert figures["commplan/compute_wait_s"] == len(ticks(waits))
    for lane, of in {**of_lane, "": everything}.items():
        if of or not lane:
            scope = f"commplan/{lane}" if lane else "commplan"
            assert figures[f"{scope}/hidden_s"] == len(ticks(of) - ticks(waits))
            assert figures[f"{scope}/exposed_s"] == len(ticks(of) & ticks(waits))
            assert figures[f"{scope}/idle_s"] == len(whole - ticks(of))
        else:
            assert f"commplan/{lane}/hidden_s" not in figures


@given(lanes, apart(), st.data())
def test_each_op_and_its_waiting_for_peers(
    of_lane: dict[str, list[tuple[int, int]]], waits: list[tuple[int, int]], data: st.DataObject
) -> None:
    report = report_of(of_lane, waits)
    arrived = {op.op: data.draw(st.integers(0, TICKS + 8), label=op.op) for op in report.ops}
    described = describe_backward(report, 0, Arrivals({op: [(at, 1)] for op, at in arrived.items()}, 0.0, 1))
    waiting: dict[str, set[int]] = {lane: set() for lane in LANES}
    for op, interval in zip(described.ops, report.ops, strict=True):
        run = set(range(int(interval.begin_s), int(interval.end_s)))
        for_peers = {tick for tick in run if tick < arrived[op.op]}
        assert op.exposed_s == len(run & ticks(waits))
        assert op.peers_s == len(for_peers)
        assert bool(op.reasons) == (op.exposed_s > 0)
        waiting[interval.lane] |= for_peers
    for lane in described.lanes:
        expected = set().union(*waiting.values()) if lane.lane == ALL_LANES else waiting[lane.lane]
        assert lane.peers_s == len(expected)


@given(lanes, apart())
def test_peers_that_were_not_asked_are_unknown(of_lane: dict[str, list[tuple[int, int]]], waits: list[tuple[int, int]]) -> None:
    described = describe_backward(report_of(of_lane, waits), 0, None)
    assert {lane.peers_s for lane in described.lanes} == {None}
    assert {op.peers_s for op in described.ops} <= {None}


@given(lanes, apart())
def test_waits_are_found_by_bisection_as_by_looking_at_all(
    of_lane: dict[str, list[tuple[int, int]]], waits: list[tuple[int, int]]
) -> None:
    report = report_of(of_lane, waits)
    explainer = Explainer(report)
    for run in explainer.runs:
        begin, end = run.interval.begin_s, run.interval.end_s
        assert explainer.exposed_s(run) == sum(max(0, min(end, b + n) - max(begin, b)) for b, n in waits)


begins = st.dictionaries(st.sampled_from(("RS_0", "AR_0", "AR_1")), st.lists(st.integers(0, 9), max_size=3), max_size=3)


@given(st.lists(st.tuples(st.integers(0, 5), begins), min_size=1, max_size=5))
def test_the_last_of_a_group(of_ranks: list[tuple[float, Begins]]) -> None:
    ranks = [10 * i for i in range(len(of_ranks))]
    error_s, last = last_arrivals(ranks, of_ranks)
    assert error_s == max(error for error, _ in of_ranks)
    for op in ("RS_0", "AR_0", "AR_1"):
        turns = max(len(times.get(op, [])) for _, times in of_ranks)
        assert len(last.get(op, [])) == turns
        for turn in range(turns):
            came = [
                (times[op][turn], rank)
                for rank, (_, times) in zip(ranks, of_ranks, strict=True)
                if turn < len(times.get(op, []))
            ]
            assert last[op][turn] == max(came)


def test_begins_are_told_to_the_group_of_each_op() -> None:
    ops = [Interval("RS_0", "a", 1, 2), Interval("AR_0", "b", 3, 4), Interval("RS_0", "a", 5, 6), Interval("AR_1", "b", 7, 8)]
    ranks_of = {"RS_0": (0, 1), "AR_0": (0, 2), "AR_1": (0,)}
    report = BackwardReport(0, 9, ops, (), 0, 0, 1, None, ranks_of)
    assert begins_by_group(report, 100.0) == {(0, 1): {"RS_0": [101.0, 105.0]}, (0, 2): {"AR_0": [103.0]}}
