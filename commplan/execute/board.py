"""Notes that ranks leave for one another in a store, one meeting after another. No collective, no thread, no group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property

from torch.distributed.distributed_c10d import Store

from commplan.errors import ExecutionError
from commplan.execute.ranks import listed
from commplan.execute.stores import set_once

# A rank that waits for the outcome waits longer than the one that finds it out.
PATIENCE_S = 2.0

OUTCOME = "outcome"
"""The note by which a meeting is decided."""


class Board:
    """Notes by key; all ranks hold the same meetings, whatever becomes of them.

    Args:
        connect: makes a connection to the store, to be used by one thread; called when first needed, since a job of
            thousands of ranks pays for each.
        prefix: begins the names of its keys; the same on `ranks`, and never used before.
        rank, ranks: this one, and all that meet.
    """

    def __init__(self, connect: Callable[[], Store], prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self._connect = connect
        self._prefix = prefix
        self.rank = rank
        self.ranks = ranks
        self.timeout_s = 0.0
        self._number = 0
        self._came_late = False
        self._posted: list[str] = []
        self._stale: list[str] = []

    @cached_property
    def _store(self) -> Store:
        return self._connect()

    def begin(self, timeout_s: float) -> None:
        """Begin the next meeting: keys are new. `timeout_s` says how long to wait for a note.

        Who comes to a meeting that is decided is told what was decided there; the next time it leaves out all that are, and
        is in step with whoever met without it.
        """
        self.timeout_s = timeout_s
        self._number += 1
        self._stale, self._posted = [*self._stale, *self._posted], []
        is_decided = self._is_decided()
        while is_decided and self._came_late:
            self._number += 1
            is_decided = self._is_decided()
        self._came_late = is_decided

    def _is_decided(self) -> bool:
        return self._store.check([self._key(OUTCOME)])

    def clean(self) -> None:
        """Delete what this rank left in earlier meetings, since every rank has come to this one."""
        while self._stale:
            self._store.delete_key(self._stale.pop())

    def post(self, key: str, text: str) -> None:
        """Leave a note."""
        self._posted.append(self._key(key))
        self._store.set(self._key(key), text)

    def decide(self, key: str, text: str) -> str:
        """Leave a note unless another rank did; the one that is there."""
        self._posted.append(self._key(key))
        return set_once(self._store, self._key(key), text)

    def missing(self, keys: Sequence[str], timeout_s: float) -> list[int]:
        """Wait for all of these notes; the places of those that did not come."""
        try:
            self._store.wait([self._key(key) for key in keys], timedelta(seconds=timeout_s))
        except RuntimeError:
            return [i for i, key in enumerate(keys) if not self._store.check([self._key(key)])]
        return []

    def await_note(self, key: str, of: int) -> None:
        """Return when rank `of` has left a note.

        Raises:
            ExecutionError: not in time.
        """
        if self.missing([key], self.timeout_s + PATIENCE_S):
            raise ExecutionError(f"rank {of} went away in the middle of report(): it left no note within {self.timeout_s:g} s")

    def read(self, key: str, of: int) -> str:
        """The note of rank `of`. Raises as `await_note` does."""
        self.await_note(key, of)
        return self._store.get(self._key(key)).decode()

    def read_all(self, key_of: Sequence[tuple[str, int]]) -> list[str]:
        """Notes by key and rank. Raises as `await_note` does, and names the ranks."""
        keys = [key for key, _ in key_of]
        if absent := self.missing(keys, self.timeout_s + PATIENCE_S):
            ranks = listed([key_of[i][1] for i in absent])
            raise ExecutionError(
                f"rank(s) {ranks} went away in the middle of report(): no note of theirs within {self.timeout_s:g} s"
            )
        return [text.decode() for text in self._store.multi_get([self._key(key) for key in keys])]

    def _key(self, key: str) -> str:
        return f"{self._prefix}/report/{self._number}/{key}"
