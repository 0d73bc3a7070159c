"""The small parts of the executor against brute force."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from commplan.execute.agreement import REFUSED, difference
from commplan.execute.control import describe_divergence
from commplan.execute.instance import add_into, merge_layouts
from commplan.execute.interface import Layout
from commplan.execute.memory import Memory
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport

# Reports.

LANES = ("shard", "replicate")
TICKS = 24
spans = st.lists(st.tuples(st.integers(0, TICKS - 1), st.integers(0, 8)), max_size=6)


@given(spans, spans, spans)
def test_hidden_and_exposed_against_counting_ticks(
    shard: list[tuple[int, int]], replicate: list[tuple[int, int]], waits: list[tuple[int, int]]
) -> None:
    def intervals(lane: str, of: list[tuple[int, int]]) -> tuple[Interval, ...]:
        return tuple(Interval("op", lane, begin, begin + length) for begin, length in of)

    def ticks(of: list[tuple[int, int]]) -> set[int]:
        return {tick for begin, length in of for tick in range(begin, begin + length)}

    ops = intervals("shard", shard) + intervals("replicate", replicate)
    report = BackwardReport(0, TICKS, ops, intervals("compute", waits), 0, 0)
    for lane, busy in {"shard": ticks(shard), "replicate": ticks(replicate), None: ticks(shard + replicate)}.items():
        assert report.exposed_s(lane) == len(busy & ticks(waits))
        assert report.hidden_s(lane) == len(busy - ticks(waits))


# Layouts of partial sums.

parts = st.dictionaries(st.integers(0, 6), st.integers(0, 4).map(lambda n: list(range(1, n + 1))), max_size=5)


@given(parts, parts)
def test_merged_layouts_against_dicts(one: dict[int, list[int]], other: dict[int, list[int]]) -> None:
    lengths = {p: len(v) for p, v in (one | other).items()}
    one = {p: list(range(lengths[p])) for p in one}
    other = {p: [10 * x for x in range(lengths[p])] for p in other}

    def flat(of: dict[int, list[int]]) -> tuple[Layout, torch.Tensor]:
        params = tuple(sorted(of))
        values = torch.tensor([x for p in params for x in of[p]], dtype=torch.float32)
        return Layout(params, tuple(len(of[p]) for p in params)), values

    (one_layout, one_values), (other_layout, other_values) = flat(one), flat(other)
    merged = merge_layouts(one_layout, other_layout)
    total = torch.zeros(merged.numel)
    add_into(total, merged, one_values, one_layout)
    add_into(total, merged, other_values, other_layout)
    both = {p: [one.get(p, [0] * n)[i] + other.get(p, [0] * n)[i] for i in range(n)] for p, n in lengths.items()}
    right_layout, right = flat(both)
    assert merged == right_layout
    assert torch.equal(total, right)


def test_memory_counts_what_is_alive() -> None:
    memory = Memory()
    one = memory.allocate(4, torch.float32, torch.device("cpu"))
    other = memory.allocate(4, torch.bfloat16, torch.device("cpu"))
    memory.release(one)
    memory.hold(2)
    assert (memory.live_bytes, memory.peak_bytes) == (10, 24)
    memory.restart_peak()
    assert memory.peak_bytes == 10
    memory.release(other)
    assert (memory.live_bytes, memory.peak_bytes) == (2, 10)


# Differences between ranks.

subjects = st.sampled_from(("the schedule", "the params", "the plan"))
records = st.dictionaries(subjects, st.sampled_from(("a", "a\nb", "a\nc", "")), max_size=3)


@given(st.lists(records, min_size=1, max_size=6))
def test_a_difference_is_found_exactly_if_there_is_one(of_ranks: list[dict[str, str]]) -> None:
    told = difference(dict(enumerate(of_ranks)))
    assert bool(told) == any(a != b for a, b in pairwise(of_ranks))


@given(st.integers(2, 6), st.data())
def test_the_odd_rank_is_named_with_both_values(num_ranks: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, num_ranks - 1))
    told = difference({r: {"same": "x", "k": "k = 3" if r == odd else "k = 2"} for r in range(num_ranks)})
    assert "ranks disagree on k" in told
    assert "'k = 3'" in told
    assert "'k = 2'" in told
    if num_ranks > 2:
        others = ", ".join(str(r) for r in range(num_ranks) if r != odd)
        assert f"rank(s) {odd} have 'k = 3', rank(s) {others} have 'k = 2'" in told


def test_a_refusal_comes_before_any_difference() -> None:
    told = difference({0: {"k": "1"}, 1: {REFUSED: "no such schedule"}, 2: {"k": "2"}, 3: {REFUSED: "another"}})
    assert told == "rank(s) 1, 3 could not attach; rank 1 says: no such schedule"


def test_the_line_where_texts_part_is_shown() -> None:
    told = difference({0: {"text": "a\nb\nc"}, 1: {"text": "a\nb\nd"}, 2: {"text": "a\nb\nd"}})
    assert "rank(s) 0 have 'c', rank(s) 1, 2 have 'd'" in told
    told = difference({0: {"text": "a\nb"}, 1: {"text": "a"}, 2: {"text": "a"}})
    assert "'b' besides" in told


lines = st.lists(st.sampled_from(("m0: parameters (0,)", "m0: parameters (1,)", "m1")), max_size=4)


@given(st.lists(lines, min_size=2, max_size=5))
def test_divergence_names_who_differs_from_most_and_where(of_ranks: list[list[str]]) -> None:
    told = describe_divergence("backward 3", dict(enumerate(of_ranks)))
    assert "ranks disagree on backward 3" in told
    if all(record == of_ranks[0] for record in of_ranks):
        assert "different backwards" in told
        return
    most = max(of_ranks, key=of_ranks.count)
    if sum(record == most for record in of_ranks) * 2 > len(of_ranks):
        odd = ", ".join(str(r) for r, record in enumerate(of_ranks) if record != most)
        assert f"rank(s) {odd} have" in told


def test_many_ranks_are_summed_up() -> None:
    told = difference({r: {"k": "1" if r < 20 else "2"} for r in range(64)})
    assert "and 12 more" in told
    assert len(told) < 400
