"""When the peers of each collective arrived: ranks compare their last backward, between backwards, when all of them ask.

All goes through the store, by notes: messages grow with the number of ranks, not with its square, and nothing is put into a
queue of collectives.  For each process group its first rank reads when the others began each op, and leaves who was last.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from commplan.errors import ExecutionError
from commplan.execute.board import OUTCOME, PATIENCE_S, Board
from commplan.execute.clocks import Offset, align, clock_identity
from commplan.execute.ranks import listed
from commplan.sight.figures import Arrivals
from commplan.sight.report import BackwardReport

Begins = dict[str, list[float]]
"""Op -> when it began, for each time it ran in the backward."""


class Peers:
    """Asks the other ranks of an attachment.

    Args:
        identity: equal on ranks that read one clock.
    """

    def __init__(self, board: Board, identity: str | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self._board = board
        self._identity = clock_identity() if identity is None else identity
        self._now = now

    def meet(self, report: BackwardReport | None, timeout_s: float) -> Arrivals:
        """Compare the last backward of all ranks; each of them has to call this, with its own.

        Raises:
            ExecutionError: ranks did not come in time, or come from different backwards; names them.
        """
        try:
            self._board.begin(timeout_s)
            leaders = self._convene(0 if report is None else report.number)
            assert report is not None
            offset = align(self._board, list(leaders.values()), leaders[self._identity], self._now)
            return self._exchange(report, offset, len(leaders))
        except ExecutionError:
            raise
        except (RuntimeError, ValueError) as error:  # the latter where torch has no process group any more
            raise ExecutionError(f"report() could not ask the other ranks: their store does not answer ({error})") from error

    def _convene(self, number: int) -> dict[str, int]:
        """Wait until all are here, from one backward.

        Returns:
            For each clock the rank that leads those who read it.
        """
        board = self._board
        first = board.ranks[0]
        board.post(f"here/{board.rank}", json.dumps([number, self._identity]))
        if board.rank == first:
            outcome = board.decide(OUTCOME, json.dumps(self._call_roll()))
        elif board.missing([OUTCOME], board.timeout_s + PATIENCE_S):
            problem = f"rank {first}, which waits for the others, did not call report() within {board.timeout_s:g} s"
            outcome = board.decide(OUTCOME, json.dumps([problem, {}]))
        else:
            outcome = board.read(OUTCOME, of=first)
        problem, leaders = json.loads(outcome)
        if problem:
            raise ExecutionError(problem)
        board.clean()
        return dict(leaders)

    def _call_roll(self) -> tuple[str, dict[str, int]]:
        board = self._board
        here = [(f"here/{rank}", rank) for rank in board.ranks]
        if absent := board.missing([key for key, _ in here], board.timeout_s):
            ranks = listed([board.ranks[i] for i in absent])
            return f"rank(s) {ranks} did not call report() within {board.timeout_s:g} s; every rank has to call it", {}
        ranks_at: dict[int, list[int]] = defaultdict(list)
        leaders: dict[str, int] = {}
        for rank, note in zip(board.ranks, board.read_all(here), strict=True):
            number, identity = json.loads(note)
            ranks_at[number].append(rank)
            leaders.setdefault(identity, rank)
        if len(ranks_at) > 1:
            where = "; ".join(f"rank(s) {listed(ranks)} after {_backward(number)}" for number, ranks in ranks_at.items())
            return f"ranks called report() at different times: {where}", {}
        if 0 in ranks_at:
            return "report() before the first backward that reduces anything", {}
        return "", leaders

    def _exchange(self, report: BackwardReport, offset: Offset, num_clocks: int) -> Arrivals:
        board = self._board
        own_error_s = offset.error_s + report.clock_error_s
        begins = begins_by_group(report, offset.offset_s)
        for ranks, of_group in begins.items():
            board.post(f"begins/{_name(ranks)}/{board.rank}", json.dumps([own_error_s, of_group]))
        for ranks in begins:
            if board.rank == ranks[0]:
                notes = board.read_all([(f"begins/{_name(ranks)}/{rank}", rank) for rank in ranks])
                board.post(f"last/{_name(ranks)}", json.dumps(last_arrivals(ranks, [json.loads(note) for note in notes])))
        last_peers: dict[str, Sequence[tuple[float, int]]] = {}
        error_s = 0.0
        for ranks in begins:
            group_error_s, last_of = json.loads(board.read(f"last/{_name(ranks)}", of=ranks[0]))
            error_s = max(error_s, group_error_s)
            for op, last in last_of.items():
                last_peers[op] = [(at_s - offset.offset_s, rank) for at_s, rank in last]
        return Arrivals(last_peers, own_error_s + error_s, num_clocks)


def begins_by_group(report: BackwardReport, offset_s: float) -> dict[tuple[int, ...], Begins]:
    """When this rank began each op that has peers, by the ranks of its process group, on the reference's clock."""
    found: dict[tuple[int, ...], Begins] = defaultdict(lambda: defaultdict(list))
    for interval in report.ops:
        ranks = report.ranks_of.get(interval.op, ())
        if len(ranks) > 1:
            found[ranks][interval.op].append(interval.begin_s + offset_s)
    return {ranks: dict(begins) for ranks, begins in found.items()}


def last_arrivals(
    ranks: Sequence[int], begins_of: Sequence[tuple[float, Begins]]
) -> tuple[float, dict[str, list[tuple[float, int]]]]:
    """What the ranks of one group know together.

    Args:
        begins_of: for each rank the error of its clock and its begins.

    Returns:
        The greatest error, and for each op, each time it ran, when the last rank began it and which one that was.
    """
    last: dict[str, list[tuple[float, int]]] = {}
    for rank, (_, begins) in zip(ranks, begins_of, strict=True):
        for op, times in begins.items():
            known = last.setdefault(op, [])
            known.extend((at_s, rank) for at_s in times[len(known) :])
            known[: len(times)] = [max(pair, (at_s, rank)) for pair, at_s in zip(known, times, strict=False)]
    return max(error_s for error_s, _ in begins_of), last


def _backward(number: int) -> str:
    return f"backward {number}" if number else "no backward"


def _name(ranks: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
