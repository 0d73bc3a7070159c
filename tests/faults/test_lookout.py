"""Notes in the store: who waits where, who is silent, who gave up first; and a store that is gone delays no error."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from commplan.errors import CollectiveTimeoutError, ExecutionError
from commplan.execute.lookout import Lookout, Place
from commplan.fsdp2.torch_faults import own_store

PATIENCE_S = 60.0
STUCK = "AR_3 of module 'b.1' on the group of ranks [0, 1]"

Make = Callable[..., Lookout]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Lookout] = []

    def lookout(
        store: dist.Store,
        rank: int,
        place: Place,
        fail: Callable[[ExecutionError], None] = lambda error: None,
        timeout_s: float = 600.0,
    ) -> Lookout:
        made.append(Lookout(store, "job", rank, range(3), timeout_s))
        made[-1].watch(lambda: place, fail)
        return made[-1]

    yield lookout
    for one in made:
        one.close()


def test_an_error_tells_where_every_rank_is(make: Make) -> None:
    store = dist.HashStore()
    mine = make(store, 0, Place("in backward 7", ((STUCK, time.perf_counter()),)))
    make(store, 1, Place("in backward 7", (("RS_5", time.perf_counter()),)))
    make(store, 2, Place("after backward 6"))
    error = mine.explain(CollectiveTimeoutError(f"{STUCK} did not end within 3.0 s."))
    assert type(error) is CollectiveTimeoutError
    assert str(error).startswith(f"{STUCK} did not end within 3.0 s. Ranks: ")
    assert f"0 in backward 7, gave up on {STUCK} (" in str(error)
    assert "1 in backward 7, in RS_5 (" in str(error)
    assert "2 after backward 6 (" in str(error)


def test_ranks_at_one_place_are_told_together_and_silent_ones_as_such(make: Make) -> None:
    store = dist.HashStore()
    mine = make(store, 0, Place("in backward 7"))
    for rank in (1, 2):
        store.set(f"job/place/{rank}", json.dumps([time.time() - 301, "in backward 6"]))
    message = str(mine.explain(ExecutionError("AR_3 failed: gone")))
    assert "1, 2 silent: stopped, gone or cut off; last in backward 6 (301 s ago)" in message


def test_whoever_waits_learns_who_gave_up_first(make: Make) -> None:
    """Rank 2 waits for rank 1, which fails: long before its own timeout rank 2 knows why."""
    store = dist.HashStore()
    told: list[ExecutionError] = []
    is_told = threading.Event()

    def fail(error: ExecutionError) -> None:
        told.append(error)
        is_told.set()

    make(store, 2, Place("in backward 7", ((STUCK, time.perf_counter() - 1e3),)), fail, timeout_s=1.0)
    make(store, 0, Place("in backward 7"), fail, timeout_s=1.0)
    first = make(store, 1, Place("in backward 7"))
    assert not told
    first.explain(ExecutionError("RS_5 failed: Connection closed by peer"))
    assert is_told.wait(PATIENCE_S)
    assert str(told[0]) == f"{STUCK} can't end: rank 1 gave up: RS_5 failed: Connection closed by peer"


def test_the_first_cause_is_kept(make: Make) -> None:
    store = dist.HashStore()
    first, second, _ = (make(store, rank, Place("in backward 7")) for rank in range(3))
    assert "First" not in str(first.explain(ExecutionError("RS_5 failed: one")))
    assert "First rank 0 gave up: RS_5 failed: one Ranks: " in str(second.explain(ExecutionError("AR_3 failed: two")))


class DeadStore:
    """Answers until its host dies; then it raises, or says nothing at all."""

    def __init__(self, *, hangs: bool) -> None:
        self._store = dist.HashStore()
        self._hangs = hangs
        self.is_dead = False
        self.over = threading.Event()

    def __getattr__(self, name: str) -> object:
        if self.is_dead:
            if not self._hangs:
                raise RuntimeError("Broken pipe")
            self.over.wait(PATIENCE_S)
        return getattr(self._store, name)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_store_that_is_gone(make: Make, hangs: bool) -> None:
    store = DeadStore(hangs=hangs)
    mine = make(store, 0, Place("in backward 7"))
    store.is_dead = True
    begin_s = time.monotonic()
    for _ in range(2):
        message = str(mine.explain(ExecutionError("AR_3 failed: gone")))
        assert message.startswith("AR_3 failed: gone The store with the notes of other ranks does not answer")
    assert time.monotonic() - begin_s < PATIENCE_S / 2
    store.over.set()


def test_no_connection_is_sought_to_a_store_that_is_gone() -> None:
    """That would take as long as the job's timeout."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=120))
    assert own_store(client).check(["a key"]) is False
    del server
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError):
        own_store(client)
    assert time.monotonic() - begin_s < 60
