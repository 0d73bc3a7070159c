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
        elif board.missing(["outcome of all"], self._timeout_s + PATIENCE_S):
            raise ExecutionError(
                f"{what}: rank {board.ranks[0]}, which waits for the others, was not heard of for {self._timeout_s:g} s"
            )
        outcome = json.loads(board.read("outcome of all", of=board.ranks[0]))
        board.clean()
        if outcome["problem"]:
            raise ExecutionError(outcome["problem"])
        return outcome["value"]

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
                return {"problem": f"{what}: rank {rank} gave up: {note['error']}"}
        try:
            return {"problem": "", "value": conclude([note["value"] for note in notes])}
        except Exception as error:  # noqa: BLE001 - the others wait for a word; all of them raise it
            return {"problem": f"{what}: what ranks measured does not fit together: {type(error).__name__}: {error}"}
