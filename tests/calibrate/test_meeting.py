"""Ranks that meet through a store, as threads of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commplan.calibrate.meeting import Meeting
from commplan.errors import ExecutionError
from commplan.execute.board import Board


def meet(*ranks: Callable[[Meeting], Any], timeout_s: float = 20.0) -> list[Any]:
    """What each rank returns or raises."""
    store = dist.HashStore()

    def serve(rank: int) -> Any:
        try:
            return ranks[rank](Meeting(Board(lambda: store, "here", rank, range(len(ranks))), timeout_s))
        except ExecutionError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(serve, range(len(ranks))))


def test_all_get_what_the_first_makes_of_all_again_and_again() -> None:
    def of(rank: int) -> Callable[[Meeting], list[int]]:
        return lambda meeting: [meeting.conclude(rank + turn, sum, "adding") for turn in range(4)]

    assert meet(*map(of, range(3))) == [[3, 6, 9, 12]] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    def comes(meeting: Meeting) -> Any:
        return meeting.conclude(1, sum, "the all_reduce of 4096 bytes")

    first, absent, last = meet(comes, lambda meeting: None, comes, timeout_s=1.0)
    assert absent is None
    for error in (first, last):
        assert str(error) == "the all_reduce of 4096 bytes: rank(s) 1 did not come within 1 s"


def test_a_rank_that_gave_up_says_why() -> None:
    def fails(meeting: Meeting) -> None:
        meeting.give_up(RuntimeError("the cable is out"))

    found = meet(lambda meeting: meeting.conclude(1, sum, "adding"), fails)
    assert str(found[0]) == "adding: rank 1 gave up: RuntimeError: the cable is out"


def test_the_others_do_not_wait_for_the_first_without_end() -> None:
    found = meet(lambda meeting: None, lambda meeting: meeting.conclude(1, sum, "adding"), timeout_s=0.2)
    assert isinstance(found[1], ExecutionError)
    with pytest.raises(ExecutionError, match="rank 0, which waits for the others, was not heard of for 0"):
        raise found[1]


def test_values_that_do_not_fit_together_are_told_to_all() -> None:
    def of(value: dict[str, int]) -> Callable[[Meeting], Any]:
        return lambda meeting: meeting.conclude(value, lambda values: [one["a"] for one in values], "adding")

    for error in meet(of({"a": 1}), of({"b": 1})):
        assert isinstance(error, ExecutionError)
        assert str(error) == "adding: what ranks measured does not fit together: KeyError: 'a'"


def test_the_others_hear_why_the_first_gave_up() -> None:
    def fails(meeting: Meeting) -> None:
        meeting.give_up(RuntimeError("the cable is out"))

    found = meet(fails, lambda meeting: meeting.conclude(1, sum, "adding"), timeout_s=5.0)
    assert str(found[1]) == "adding: rank 0 gave up: RuntimeError: the cable is out"


class Timed:
    """A board of rank 1 of three, on which notes come at given seconds."""

    rank, ranks = 1, (0, 1, 2)

    def __init__(self, first_s: float, outcome_s: float) -> None:
        self._at_s = {"value/0": first_s, "outcome of all": outcome_s}
        self._now_s = 0.0

    def begin(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def post(self, key: str, text: str) -> None:
        pass

    def clean(self) -> None:
        pass

    def missing(self, keys: Sequence[str], timeout_s: float) -> list[int]:
        last_s = max(self._at_s[key] for key in keys)
        self._now_s = min(max(last_s, self._now_s), self._now_s + timeout_s)
        return [place for place, key in enumerate(keys) if self._at_s[key] > self._now_s]

    def read(self, key: str, of: int) -> str:
        return json.dumps({"problem": "", "value": "all were there"})

    def read_all(self, keys: Sequence[tuple[str, int]]) -> list[str]:
        return [json.dumps({"value": 0}) for _ in keys]


@given(st.floats(0, 9.9), st.floats(0, 9.9))
def test_who_is_early_waits_for_as_long_as_the_first_does(first_s: float, late_s: float) -> None:
    """The first comes within the timeout, and the last one within the timeout from then."""
    board = Timed(first_s, first_s + late_s)
    assert Meeting(cast(Any, board), 10.0).conclude(1, sum, "adding") == "all were there"
