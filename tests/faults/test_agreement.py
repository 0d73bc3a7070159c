"""Ranks that come late, or not at all, to the comparison before attach: all go on, or none; and they can try again."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch.distributed as dist

from commplan.errors import RankMismatchError
from commplan.execute.agreement import REFUSED, agree, confirm

RANKS = (0, 1, 2)
LONG_S = 60.0
SHORT_S = 0.2


class Counting:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.num_requests = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def asked(*args: Any) -> Any:
            self.num_requests += 1
            return method(*args)

        return asked


def together(calls: Mapping[int, Callable[[], str]]) -> dict[int, str]:
    """Run each rank's call on a thread: what it returned, or the message of its error."""
    found: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = calls[rank]()
        except RankMismatchError as error:
            found[rank] = f"error: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return found


def attempt(store: dist.Store, rank: int, timeout_s: float = LONG_S, **record: str) -> Callable[[], str]:
    return lambda: agree(store, RANKS, rank, record, timeout_s)


def test_each_agreement_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    names = [together({rank: attempt(store, rank) for rank in RANKS}) for _ in range(3)]
    assert all(len(set(of_turn.values())) == 1 for of_turn in names)
    assert len({of_turn[0] for of_turn in names}) == 3


@pytest.mark.parametrize("num_missed", [1, 3])
def test_a_rank_that_came_too_late_is_in_step_at_the_next_attempt(num_missed: int) -> None:
    store = dist.HashStore()
    for _ in range(num_missed):
        found = together({rank: attempt(store, rank, SHORT_S) for rank in (0, 1)})
        assert all("rank(s) 2 did not attach within 0.2 s" in message for message in found.values())
    found = together({rank: attempt(store, rank) for rank in RANKS})
    assert len(set(found.values())) == 1
    assert not found[0].startswith("error")


def test_a_late_rank_never_attaches_alone() -> None:
    """Whenever the last rank comes, be it at the very end of the others' patience: all have one outcome."""
    for delay_s in (0.0, 0.19, 0.195, 0.2, 0.205, 0.21, 0.4):
        store = dist.HashStore()

        def late(delay_s: float = delay_s, store: dist.Store = store) -> str:
            time.sleep(delay_s)
            return agree(store, RANKS, 2, {}, 1.0)

        found = together({0: attempt(store, 0, SHORT_S), 1: attempt(store, 1, SHORT_S), 2: late})
        assert len({message.startswith("error") for message in found.values()}) == 1, found


def test_a_refusal_is_told_without_waiting() -> None:
    store = dist.HashStore()
    agree(store, RANKS, 1, {REFUSED: "no schedule"}, LONG_S)
    found = together({rank: attempt(store, rank) for rank in (0, 2)})
    assert all("rank 1 says: no schedule" in message for message in found.values())
    found = together({rank: attempt(store, rank) for rank in RANKS})
    assert len(set(found.values())) == 1
    assert not found[0].startswith("error")


@pytest.mark.parametrize("differ", [False, True])
def test_requests_are_linear_in_the_ranks(differ: bool) -> None:
    """A store that serves thousands of ranks can't serve each pair of them."""
    of_count = {}
    for num_ranks in (8, 32):
        store = Counting()
        ranks = range(num_ranks)

        def call(rank: int, store: Counting = store, ranks: range = ranks) -> str:
            return agree(cast(dist.Store, store), ranks, rank, {"step": str(differ and rank == 0)}, LONG_S)

        found = together({rank: functools.partial(call, rank) for rank in ranks})
        assert len(set(found.values())) == 1
        assert found[0].startswith("error: ranks disagree on step: rank(s) 0 have 'True'") == differ
        of_count[num_ranks] = store.num_requests
    assert of_count[32] <= 4 * of_count[8]


def test_only_the_first_difference_is_told_in_words() -> None:
    store = dist.HashStore()
    found = together({rank: attempt(store, rank, first="same", second=f"line\n{rank // 2}", third=str(rank)) for rank in RANKS})
    assert set(found.values()) == {"error: ranks disagree on second: rank(s) 2 have '1', rank(s) 0, 1 have '0'"}


def test_requests_are_linear_where_a_rank_is_missing() -> None:
    """All others lose patience together; one of them calls the roll."""
    of_count = {}
    for num_ranks in (8, 32):
        store = Counting()
        ranks = range(num_ranks)

        def call(rank: int, store: Counting = store, ranks: range = ranks) -> str:
            return agree(cast(dist.Store, store), ranks, rank, {}, 1.0)

        found = together({rank: functools.partial(call, rank) for rank in ranks if rank != 3})
        assert all("rank(s) 3 did not attach within 1 s" in message for message in found.values())
        of_count[num_ranks] = store.num_requests / (num_ranks - 1)
    assert of_count[32] <= of_count[8] + 1


def test_a_refusal_that_comes_too_late_leaves_the_next_attempt_alone() -> None:
    store = dist.HashStore()
    together({rank: attempt(store, rank, SHORT_S) for rank in (0, 1)})
    agree(store, RANKS, 2, {REFUSED: "no schedule"}, LONG_S)
    found = together({rank: attempt(store, rank) for rank in RANKS})
    assert len(set(found.values())) == 1
    assert not found[0].startswith("error")


def test_a_rank_that_differs_and_goes_away_is_named() -> None:
    """It has told its digest, and ends before it tells the text."""
    store = dist.HashStore()

    class Ends(Counting):
        def __init__(self) -> None:
            self.store = store
            self.num_requests = 0

        def __getattr__(self, name: str) -> Any:
            method = super().__getattr__(name)

            def asked(key: Any, *args: Any) -> Any:
                if name == "set" and "/details/" in key:
                    raise RankMismatchError("it ended")
                return method(key, *args)

            return asked

    def ends() -> str:
        return agree(cast(dist.Store, Ends()), RANKS, 2, {"plan": "other"}, 1.0)

    found = together({0: attempt(store, 0, 1.0, plan="same"), 1: attempt(store, 1, 1.0, plan="same"), 2: ends})
    told = "error: ranks disagree on plan; rank(s) 2 went away before they said what they have"
    assert (found[0], found[1]) == (told, told)


def test_a_rank_without_the_subject_has_nothing_whatever_the_others_have() -> None:
    store = dist.HashStore()
    found = together({0: attempt(store, 0, k="nothing"), 1: attempt(store, 1, k="nothing"), 2: attempt(store, 2)})
    assert set(found.values()) == {
        "error: ranks disagree on k: rank(s) 2 have nothing there, rank(s) 0, 1 have 'nothing' besides"
    }


# Confirming what was agreed on.


def confirmation(
    store: dist.Store, rank: int, agreement: str, timeout_s: float = LONG_S, refusal: str = ""
) -> Callable[[], str]:
    def run() -> str:
        confirm(store, RANKS, rank, agreement, timeout_s, refusal)
        return "confirmed"

    return run


def test_all_confirm_or_none() -> None:
    store = dist.HashStore()
    (name,) = set(together({rank: attempt(store, rank) for rank in RANKS}).values())
    assert set(together({rank: confirmation(store, rank, name) for rank in RANKS}).values()) == {"confirmed"}
    (name,) = set(together({rank: attempt(store, rank) for rank in RANKS}).values())
    confirm(store, RANKS, 1, name, LONG_S, "no group")
    found = together({rank: confirmation(store, rank, name) for rank in (0, 2)})
    assert set(found.values()) == {"error: rank(s) 1 could not attach; rank 1 says: no group"}


@pytest.mark.parametrize("refusal", ["", "no group"])
def test_who_confirms_too_late_is_in_step_at_the_next_attempt(refusal: str) -> None:
    store = dist.HashStore()
    (name,) = set(together({rank: attempt(store, rank) for rank in RANKS}).values())
    found = together({rank: confirmation(store, rank, name, SHORT_S) for rank in (0, 1)})
    assert all("rank(s) 2 did not attach within 0.2 s" in message for message in found.values())
    late = together({2: confirmation(store, 2, name, refusal=refusal)})
    assert refusal or late == {2: found[0]}
    again = together({rank: attempt(store, rank, same="x") for rank in RANKS})
    assert len(set(again.values())) == 1
    assert not again[0].startswith("error")
