"""Clocks that are wrong by a known amount: the estimate is off by no more than it says, on as many hosts as there are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch.distributed import HashStore, TCPStore

from commplan.errors import ExecutionError
from commplan.execute.board import Board
from commplan.execute.clocks import FAN_OUT, Offset, align, clock_identity
from commplan.execute.peers import Peers
from commplan.sight.figures import Arrivals
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport

T = TypeVar("T")


def on_threads(num_ranks: int, run: Callable[[int], T]) -> list[T]:
    """`run(rank)` on a thread for each."""
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def clock(skew_s: float) -> Callable[[], float]:
    return lambda: time.perf_counter() + skew_s


def aligned(store: object, skews_s: Sequence[float], host_of: Sequence[int]) -> list[Offset]:
    """What each rank finds; ranks of one host have one skew."""
    num_ranks = len(host_of)
    leaders = sorted({host: rank for rank, host in reversed(list(enumerate(host_of)))}.values())

    def run(rank: int) -> Offset:
        board = Board(lambda: store, "test", rank, range(num_ranks))
        board.begin(60)
        leader = next(r for r in leaders if host_of[r] == host_of[rank])
        return align(board, leaders, leader, clock(skews_s[host_of[rank]]))

    return on_threads(num_ranks, run)


@pytest.mark.parametrize("num_hosts", [1, 2, FAN_OUT + 1, FAN_OUT + 4])
def test_an_offset_is_off_by_no_more_than_its_error(num_hosts: int) -> None:
    skews_s = [(host * 7919 % 101 - 50) * 10.0 for host in range(num_hosts)]
    host_of = [host for host in range(num_hosts) for _ in range(1 + host % 2)]
    found = aligned(HashStore(), skews_s, host_of)
    for host, offset in zip(host_of, found, strict=True):
        assert abs(offset.offset_s - (skews_s[0] - skews_s[host])) <= offset.error_s
        assert offset == found[host_of.index(host)]
        # Skews are up to 500 s; whoever is asked answers sooner than that.
        assert offset.error_s < 100


def test_clocks_that_are_one_are_found_equal_over_tcp() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = on_threads(3, lambda rank: _align_one(TCPStore("127.0.0.1", server.port, wait_for_workers=False), rank))
    for offset in found:
        assert abs(offset.offset_s) <= offset.error_s < 100


def _align_one(store: TCPStore, rank: int) -> Offset:
    board = Board(lambda: store, "test", rank, range(3))
    board.begin(60)
    return align(board, [0, 1, 2], rank)


def test_the_first_rank_is_the_reference() -> None:
    assert aligned(HashStore(), [5.0], [0])[0] == Offset(0.0, 0.0)


def test_a_clock_is_that_of_a_host() -> None:
    assert clock_identity() == on_threads(2, lambda rank: clock_identity())[0]


def test_a_leader_that_goes_away_is_named() -> None:
    board = Board(HashStore, "test", 1, range(2))
    board.begin(0.1)
    with pytest.raises(ExecutionError, match="rank 0 went away in the middle of report"):
        align(board, [0, 1], 1)


# Meetings: ranks with clocks of their own, groups as on a mesh.

SHARD = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
REPLICATE = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}


def backward(rank: int, skew_s: float, begins_s: dict[str, list[float]], number: int = 1) -> BackwardReport:
    """A backward in which ops began at these true times."""
    begun = sorted((at, op) for op, times in begins_s.items() for at in times)
    ops = tuple(Interval(op, "lane", at + skew_s, at + skew_s + 100) for at, op in begun)
    ranks_of = {op: (SHARD if op.startswith("RS") else REPLICATE)[rank] for op in begins_s}
    return BackwardReport(0, 1000, ops, (), 0, 0, number, None, ranks_of)


def meet(
    skews_s: Sequence[float], report_of: Callable[[int], BackwardReport | None], hosts: Sequence[str], timeout_s: float = 60
) -> list[Arrivals | str]:
    store = HashStore()

    def run(rank: int) -> Arrivals | str:
        peers = Peers(Board(lambda: store, "test", rank, range(4)), hosts[rank], clock(skews_s[rank]))
        try:
            return peers.meet(report_of(rank), timeout_s)
        except ExecutionError as error:
            return str(error)

    return on_threads(4, run)


def begins(rank: int) -> dict[str, list[float]]:
    """Ranks 1 and 2 are late for RS_0, 2 and 3 for the first AR_0, 0 and 3 for the second: by more than any clock is wrong."""
    return {"RS_0": [10.0 + 1000 * (rank in {1, 2})], "AR_0": [2000.0 + 500 * rank, 5000.0 + 1000 * (rank in {0, 3})]}


@pytest.mark.parametrize(
    ("skews_s", "hosts"), [((0, 0, 0, 0), "aaaa"), ((0, 0, -500, -500), "aabb"), ((3, -70, 900, 0), "abcd")]
)
def test_each_rank_knows_the_last_of_its_own_groups(skews_s: Sequence[float], hosts: str) -> None:
    found = meet(skews_s, lambda rank: backward(rank, skews_s[rank], begins(rank)), hosts)
    for rank, arrivals in enumerate(found):
        assert isinstance(arrivals, Arrivals)
        assert arrivals.num_clocks == len(set(hosts))
        expected = {
            op: [max((begins(peer)[op][turn], peer) for peer in groups[rank]) for turn in range(len(begins(rank)[op]))]
            for op, groups in (("RS_0", SHARD), ("AR_0", REPLICATE))
        }
        assert arrivals.last_peers.keys() == expected.keys()
        for op, last in expected.items():
            for (at_s, peer), (true_s, true_peer) in zip(arrivals.last_peers[op], last, strict=True):
                assert abs(at_s - skews_s[rank] - true_s) <= arrivals.error_s + 1e-6
                assert peer == true_peer
    if len(set(hosts)) == 1:
        assert all(isinstance(arrivals, Arrivals) and arrivals.error_s == 0 for arrivals in found)


def test_ranks_from_different_backwards_are_named() -> None:
    said = meet((0,) * 4, lambda rank: backward(rank, 0, begins(rank), number=7 + (rank == 1)), "aaaa")
    told = "ranks called report() at different times: rank(s) 0, 2, 3 after backward 7; rank(s) 1 after backward 8"
    assert said == [told] * 4


def test_ranks_without_a_backward() -> None:
    said = meet((0,) * 4, lambda rank: None, "aaaa")
    assert said == ["report() before the first backward that reduces anything"] * 4
    said = meet((0,) * 4, lambda rank: None if rank == 3 else backward(rank, 0, begins(rank)), "aaaa")
    assert all("rank(s) 3 after no backward" in str(told) for told in said)


@pytest.mark.parametrize("absent", [0, 2])
def test_ranks_that_do_not_come_are_named_by_all(absent: int) -> None:
    store = HashStore()

    def run(rank: int) -> str:
        if rank == absent:
            return ""
        with pytest.raises(ExecutionError) as caught:
            Peers(Board(lambda: store, "test", rank, range(4)), "a").meet(backward(rank, 0, begins(rank)), 0.3)
        return str(caught.value)

    said = on_threads(4, run)
    assert all(
        str(absent) in said[rank] and "did not call report() within 0.3 s" in said[rank] for rank in range(4) if rank != absent
    )


def test_ranks_are_told_of_a_call_that_they_missed_and_are_in_step_at_the_next() -> None:
    store = HashStore()
    all_peers = [Peers(Board(lambda: store, "test", rank, range(4)), "a") for rank in range(4)]
    for _ in range(2):
        with pytest.raises(ExecutionError, match=r"rank\(s\) 1, 2, 3 did not call report"):
            all_peers[0].meet(backward(0, 0, begins(0)), 0.1)

    def late(rank: int) -> None:
        with pytest.raises(ExecutionError, match=r"rank\(s\) 1, 2, 3 did not call report"):
            all_peers[rank].meet(backward(rank, 0, begins(rank)), 0.1)

    on_threads(4, late)
    for _ in range(2):
        found = on_threads(4, lambda rank: all_peers[rank].meet(backward(rank, 0, begins(rank)), 60))
        assert all(arrivals.num_clocks == 1 for arrivals in found)


def test_notes_of_earlier_meetings_are_deleted() -> None:
    store = HashStore()
    barrier = threading.Barrier(4)
    num_keys: list[int] = []

    def run(rank: int) -> None:
        peers = Peers(Board(lambda: store, "test", rank, range(4)), "a")
        for _ in range(5):
            peers.meet(backward(rank, 0, begins(rank)), 60)
            barrier.wait()
            if rank == 0:
                num_keys.append(store.num_keys())
            barrier.wait()

    on_threads(4, run)
    assert num_keys[-1] <= num_keys[1]


class Counting:
    """A store that counts the keys it is asked for or given."""

    def __init__(self) -> None:
        self._inner = HashStore()
        self._lock = threading.Lock()
        self.num_keys = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._inner, name)

        def counted(key: object, *rest: object) -> object:
            with self._lock:
                self.num_keys += len(key) if isinstance(key, list) else 1
            return method(key, *rest)

        return counted


def keys_a_rank(num_replicas: int) -> float:
    """How many keys a report takes for each rank of `num_replicas` hosts, each of which holds one shard group of 4."""
    num_ranks = 4 * num_replicas
    store = Counting()

    def run(rank: int) -> None:
        host = rank // 4
        shard, replicate = tuple(range(4 * host, 4 * host + 4)), tuple(range(rank % 4, num_ranks, 4))
        ops = [Interval(f"{kind}_{n}", "lane", n, n + 1) for kind in ("RS", "AR") for n in range(3)]
        ranks_of = {op.op: shard if op.op.startswith("RS") else replicate for op in ops}
        report = BackwardReport(0, 9, ops, (), 0, 0, 1, None, ranks_of)
        board = Board(lambda: store, "test", rank, range(num_ranks))
        arrivals = Peers(board, f"host {host}").meet(report, 60)
        assert arrivals.num_clocks == num_replicas
        assert arrivals.last_peers.keys() == ranks_of.keys()

    on_threads(num_ranks, run)
    return store.num_keys / num_ranks


def test_messages_do_not_grow_with_the_square_of_ranks() -> None:
    few, many = keys_a_rank(4), keys_a_rank(16)
    assert many < few * 1.5
