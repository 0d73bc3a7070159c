"""Ranks that measure meet between collectives, and never wait for one that does not come."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from commplan.errors import ExecutionError
from commplan.execute.board import PATIENCE_S, Board
from commplan.execute.ranks import listed


class Meeting:
    """Meets through notes in a store: nothing is put into a queue of collectives.

    Args:
        timeout_s: how long to wait for another rank.
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self._board = board
        self._timeout_s = timeout_s
        self.is_first = board.rank == board.ranks[0]

    def conclude(self, value: Any, conclude: Callable[[list[Any]], Any], what: str) -> Any:
        """What the first rank makes of the values of all, in the order of ranks. All of them call this alike.

        Args:
            value: this rank's, for JSON; so is what `conclude` returns.
            what: is going on, in words.

        Raises:
            ExecutionError: a rank did not come in time, or came with an error; names it.
        """
        board = self._board
        board.begin(self._timeout_s)
        board.post(f"value/{board.rank}", json.dumps({"value": value}))
        if self.is_first:
            board.post("outcome of all", json.dumps(self._outcome(conclude, what)))
        else:
            self._await_first(what)
        outcome = json.loads(board.read("outcome of all", of=board.ranks[0]))
        board.clean()
        if outcome["problem"]:
            raise ExecutionError(outcome["problem"])
        return outcome["value"]

    def _await_first(self, what: str) -> None:
        """Until the first rank has told the outcome: it waits for the others from when it comes itself."""
        board, first = self._board, self._board.ranks[0]
        silent = f"{what}: rank {first}, which waits for the others, was not heard of for {self._timeout_s:g} s"
        if board.missing([f"value/{first}"], self._timeout_s + PATIENCE_S):
            raise ExecutionError(silent)
        (text,) = board.read_all([(f"value/{first}", first)])
        if "error" in (note := json.loads(text)):
            raise ExecutionError(_gave_up(what, first, note))
        if board.missing(["outcome of all"], self._timeout_s + PATIENCE_S):
            raise ExecutionError(silent)

    def give_up(self, error: BaseException) -> None:
        """Tell those who come to the next meeting that this rank does not, and why."""
        self._board.begin(self._timeout_s)
        self._board.post(f"value/{self._board.rank}", json.dumps({"error": f"{type(error).__name__}: {error}"}))

    def _outcome(self, conclude: Callable[[list[Any]], Any], what: str) -> dict[str, Any]:
        board = self._board
        keys: Sequence[tuple[str, int]] = [(f"value/{rank}", rank) for rank in board.ranks]
        if absent := board.missing([key for key, _ in keys], self._timeout_s):
            ranks = listed([board.ranks[i] for i in absent])
            return {"problem": f"{what}: rank(s) {ranks} did not come within {self._timeout_s:g} s"}
        notes = [json.loads(text) for text in board.read_all(keys)]
        for rank, note in zip(board.ranks, notes, strict=True):
            if "error" in note:
                return {"problem": _gave_up(what, rank, note)}
        try:
            return {"problem": "", "value": conclude([note["value"] for note in notes])}
        except Exception as error:  # noqa: BLE001 - the others wait for a word; all of them raise it
            return {"problem": f"{what}: what ranks measured does not fit together: {type(error).__name__}: {error}"}


def _gave_up(what: str, rank: int, note: dict[str, Any]) -> str:
    return f"{what}: rank {rank} gave up: {note['error']}"
