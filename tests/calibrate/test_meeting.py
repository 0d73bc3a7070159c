"""Ranks that meet through a store, as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

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
