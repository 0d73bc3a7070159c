"""Turns, figures and the table, on records."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.bench.figures import STOCK, Result, Row, Sample, worst
from commplan.bench.table import lines
from commplan.bench.turns import turns


@given(st.integers(1, 7), st.integers(1, 60), st.integers(1, 60))
def test_turns_are_fair(num_rows: int, num_steps: int, block: int) -> None:
    found = list(turns(num_rows, num_steps, block))
    counted: Counter[int] = Counter()
    for number, of_round in itertools.groupby(found, key=lambda turn: turn.round):
        one_round = list(of_round)
        assert sorted(turn.row for turn in one_round) == list(range(num_rows))
        assert len({turn.num_steps for turn in one_round}) == 1
        assert 1 <= one_round[0].num_steps <= block
        assert one_round[0].num_rounds == found[-1].round + 1 > number
        for turn in one_round:
            counted[turn.row] += turn.num_steps
    assert counted == dict.fromkeys(range(num_rows), num_steps)
    # Whoever is first in a round is not so again before all others were.
    firsts = [turn.row for turn in found if turn is next(t for t in found if t.round == turn.round)]
    for begin in range(0, len(firsts) - num_rows + 1, num_rows):
        assert sorted(firsts[begin : begin + num_rows]) == list(range(num_rows))


def test_the_worst_rank_counts() -> None:
    assert worst([Sample(1.0, 0.5, 0.1, 10), Sample(0.9, 0.6, 0.0, 30)]) == Sample(1.0, 0.6, 0.1, 30)
    assert worst([Sample(1.0, device_bytes=5), Sample(2.0, device_bytes=4)]) == Sample(2.0, device_bytes=5)


def row(name: str, *step_s: float, **facts: object) -> Row:
    backward_s = None if name == STOCK else 0.5
    samples = [Sample(s, backward_s, backward_s, None if backward_s is None else 1 << 20) for s in step_s]
    return dataclasses.replace(Row(name, samples=samples), **facts)


def result(*rows: Row, num_steps: int = 3) -> Result:
    return Result(rows, "Net of 3 modules", "cpu", "gloo", 4, "2.13.0", num_steps)


def text_of(of: Result) -> str:
    return "\n".join(lines(of))


def test_a_row_is_its_medians_and_maxima() -> None:
    steps = [Sample(float(s), s / 2, s / 4, 100 - s) for s in random.Random(0).sample(range(1, 10), 9)]
    of = Row("a", samples=steps)
    assert (of.step_s, of.backward_s, of.exposed_s, of.peak_bytes, of.device_bytes) == (5.0, 2.5, 1.25, 99, None)
    assert of.middle_half_s == (3.0, 7.0)
    assert Row("a", samples=steps[:1]).middle_half_s == (steps[0].step_s, steps[0].step_s)
    assert (Row("a").step_s, Row("a").middle_half_s) == (None, None)


def test_the_best_and_who_is_not_told_apart_from_it() -> None:
    of = result(row(STOCK, 2.0, 2.0, 2.0), row("a", 0.5, 1.0, 1.5), row("near", 1.2, 1.2, 1.2), row("far", 1.3, 1.3, 1.3))
    assert of.best is of.rows[1]
    assert [found.name for found in of.near_best()] == ["near"]
    assert of.times_as_fast(of.rows[1]) == 2.0
    assert of.is_comparison
    assert not of.is_short
    text = text_of(of)
    assert "best: a, 2.00 times as fast as stock FSDP2; these steps do not tell it apart from near" in text


def test_stock_may_be_the_best() -> None:
    text = text_of(result(row(STOCK, 1.0, 1.0, 1.0), row("a", 2.0, 2.0, 2.0)))
    assert "best: stock FSDP2\n" in text + "\n"
    assert "0.50" in text


def test_what_was_refused_is_named_beside_the_table() -> None:
    of = result(row(STOCK, 2.0, 2.0, 2.0), row("a", 1.0, 1.0, 1.0), row("b", refusal="line one\nline two", params={"k": 2}))
    text = text_of(of)
    assert "left out: b k=2: line one line two" in text
    assert sum("b k=2" in line for line in text.splitlines()) == 1
    assert of.is_comparison
    assert not of.is_short


@pytest.mark.parametrize(
    ("rows", "is_comparison", "is_short"),
    [
        ([row(STOCK, 1.0, 1.0, 1.0), row("a", 1.0)], True, True),
        ([row(STOCK, 1.0), row("a")], False, True),
        ([row(STOCK), row("a", refusal="no")], False, True),
        ([row(STOCK, 1.0, 1.0, 1.0), row("a", refusal="no")], False, False),
    ],
)
def test_short_measurements(rows: list[Row], is_comparison: bool, is_short: bool) -> None:
    of = result(*rows)
    assert (of.is_comparison, of.is_short) == (is_comparison, is_short)
    assert ("short of the 3 steps" in text_of(of)) is is_short


@pytest.mark.parametrize(
    ("stock", "other", "words"),
    [
        (0.0, 0.0, ("repeatable", "equal")),
        (0.0, 1.5e-3, ("repeatable", "2e-03 off")),
        (1e-7, 0.0, ("1e-07 apart", "equal")),
        (None, None, ("-", "-")),
    ],
)
def test_gradients_in_words(stock: float | None, other: float | None, words: tuple[str, str]) -> None:
    of = result(row(STOCK, 1.0, gradient_difference=stock), row("a", 1.0, gradient_difference=other))
    assert [line.split("  ")[-1].strip() for line in text_of(of).splitlines()[3:5]] == list(words)


def test_memory_of_a_device_has_a_column_where_it_is_known() -> None:
    def of(*steps: Sample) -> str:
        return text_of(result(*(Row(name, samples=steps) for name in (STOCK, "a"))))

    assert "3.0 MiB" in of(Sample(1.0, device_bytes=3 << 20))
    assert "3.0 KiB" in of(Sample(1.0, device_bytes=3 << 10))
    assert "device memory" in of(Sample(1.0, device_bytes=3 << 20))
    assert "device memory" not in of(Sample(1.0))


def test_columns_are_aligned() -> None:
    of = result(row(STOCK, 1.0, 22.0), row("a_long_name", 333.0, gradient_difference=0.0))
    head, *body = text_of(of).splitlines()[2:5]
    end = head.index("gradients") + len("gradients")
    assert {len(line) for line in (head, *body)} == {end}


def test_json_is_plain_and_complete() -> None:
    of = result(row(STOCK, 2.0, 2.0), row("a", 1.0, 1.0, params={"k": 2}), row("b", refusal="no"))
    found = json.loads(json.dumps(of.to_dict()))
    assert found == of.to_dict()
    stock, a, b = found["rows"]
    assert (stock["ratio_native"], a["ratio_native"], b["ratio_native"]) == (1.0, 2.0, None)
    assert (a["params"], b["refusal"], found["best"]) == ({"k": 2}, "no", "a k=2")
    assert [sample["step_s"] for sample in a["samples"]] == [1.0, 1.0]
