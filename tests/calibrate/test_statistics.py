"""Figures of many ranks: curves that rise, collectives without the waiting for peers, compute that is slowed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.calibrate.marks import Call, Hook, compute_between
from commplan.calibrate.statistics import Spread, rising, rising_line, slowdown, slowest_group

seconds = st.floats(min_value=1e-6, max_value=10.0)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.data())
def test_the_rising_curve_is_the_nearest_one(values: list[int], data: st.DataObject) -> None:
    found = rising([float(value) for value in values])
    assert all(a <= b + 1e-9 for a, b in pairwise(found))
    other = sorted(data.draw(st.lists(st.integers(0, 20), min_size=len(values), max_size=len(values))))

    def distance(curve: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(curve, values, strict=True))

    assert distance(found) <= distance([float(value) for value in other]) + 1e-9


def test_what_rises_stays_as_it_is() -> None:
    assert rising([1.0, 2.0, 2.0, 5.0]) == [1.0, 2.0, 2.0, 5.0]
    assert rising([3.0, 1.0, 5.0]) == [2.0, 2.0, 5.0]


def test_a_line_that_falls_at_its_end_is_gone_on_with_as_before() -> None:
    line, of = rising_line([(1, 1.0), (10, 10.0), (40, 41.0), (80, 39.0)])
    assert line == [(1, 1.0), (10, 10.0), (60, 40.0)]
    assert of == [[0], [1], [2, 3]]
    assert rising_line([(10, 2.0), (20, 1.0)]) == ([(10, 1.5), (20, 1.5)], [[0], [1]])


def test_sizes_that_are_near_one_another_are_one() -> None:
    """As a weight of 2**20 elements, and the same with a bias."""
    line, of = rising_line([(1 << 20, 1.0), (1 << 22, 4.0), ((1 << 22) + 4096, 4.2)])
    assert line == [(1 << 20, 1.0), ((1 << 22) + 2048, 4.1)]
    assert of == [[0], [1, 2]]


@given(
    st.lists(st.tuples(seconds, st.lists(st.floats(0, 5), min_size=3, max_size=3)), min_size=1, max_size=5),
    st.floats(-1e3, 1e3),
)
def test_ranks_that_arrive_at_different_times_change_nothing(
    repetitions: list[tuple[float, list[float]]], clock: float
) -> None:
    """Every rank is through when the last has come and the collective was done; each on a clock of its own."""
    by_rank = []
    for rank in range(3):
        offset = clock * rank
        of_rank = []
        for takes_s, arrivals in repetitions:
            begin, end = arrivals[rank] + offset, max(arrivals) + takes_s + offset
            of_rank.append(end - begin)
        by_rank.append(("group", of_rank))
    expected = Spread.of([takes_s for takes_s, _ in repetitions])
    found = slowest_group(by_rank)
    assert found.median_s == pytest.approx(expected.median_s, abs=1e-9)
    assert found.num == len(repetitions)


def test_the_slowest_group_counts() -> None:
    quick, slow = ("quick", [1.0, 1.0, 1.0]), ("slow", [3.0, 2.0, 3.0])
    assert slowest_group([quick, slow, quick, ("slow", [9.0, 9.0, 9.0])]) == Spread.of([3.0, 2.0, 3.0])


@given(st.floats(0, 5), st.floats(0.1, 10), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_slowdown_is_found_again(slower: float, alone_s: float, one: float, two: float, both: float) -> None:
    """Compute that gets on by 1 / (1 + s) beside one link, by 1 / (1 + 2 s) beside two."""
    total = 1 + one + two + both
    free_s, one_s, two_s, both_s = (alone_s * part / total for part in (1, one, two, both))
    one_s, two_s, both_s = one_s * (1 + slower), two_s * (1 + slower), both_s * (1 + 2 * slower)
    beside_s = free_s + one_s + two_s + both_s
    found = slowdown(alone_s, beside_s, {"a": one_s + both_s, "b": two_s + both_s}, one_s + two_s + both_s)
    if one + two + both > 0.01 and beside_s > alone_s:
        assert found == pytest.approx(slower, rel=1e-3, abs=1e-6)


def test_compute_that_is_no_slower_is_not_slowed() -> None:
    assert slowdown(1.0, 0.9, {"a": 0.5}, 0.5) == 0
    assert slowdown(1.0, 2.0, {}, 0.0) == 0


def calls(*hooks: tuple[Hook, str]) -> list[Call]:
    """Each hook takes a second; before the one in place n, n seconds of compute lie behind the one before."""
    found, now = [], 0.0
    for place, (hook, module) in enumerate(hooks):
        now += place
        found.append(Call(hook, module, now, now + 1))
        now += 1
    return found


def test_compute_belongs_to_the_module_that_is_under_way() -> None:
    pre, post = Hook.PRE, Hook.POST
    seen = calls((pre, "root"), (pre, "b1"), (post, "b1"), (pre, "b0"), (post, "b0"), (Hook.FINAL, ""))
    found = [(module, end - begin) for module, begin, end in compute_between(seen)]
    # The loss and the head are the root's, and so is the embedding behind the last block.
    assert found == [("root", 1), ("b1", 2), ("b0", 3), ("b0", 4), ("root", 5)]


def test_compute_of_units_beside_one_another_and_within() -> None:
    pre, post = Hook.PRE, Hook.POST
    seen = calls((pre, "a"), (pre, "a.inner"), (post, "a.inner"), (post, "a"), (pre, "b"), (post, "b"), (Hook.FINAL, ""))
    found = [(module, end - begin) for module, begin, end in compute_between(seen)]
    assert found == [("a", 1), ("a.inner", 2), ("a", 3), ("b", 4), ("b", 5), ("b", 6)]
