"""Where every rank is, for messages: notes in the store, so that an error can say which rank is missing.

A rank writes a note four times within a timeout, when it waits for long, and when it gives up; it reads those of others
only when something went wrong.  The first rank that gives up leaves the cause, which ranks that wait for it soon find.
"""

from __future__ import annotations

import json
import logging
import re
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Store

from commplan.errors import ExecutionError
from commplan.execute.ending import Ending
from commplan.execute.ranks import listed

logger = logging.getLogger("commplan")

NOTES_A_TIMEOUT = 4

# How long an op runs before anybody looks whether another rank gave up; and a small part of the timeout, where that is less.
SUSPICION_S = 5.0
SUSPICIONS_A_TIMEOUT = 8

# An error does not wait longer than this for the store, which may have died with its host.
PATIENCE_S = 0.4

MAX_OP_LENGTH = 100

# What follows an op in the errors of collectives.
_VERB = re.compile(r" (?:did not end|did not begin|failed|can't end)\b")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is: `where` in words, and the ops that it waits in, each with the time since when."""

    where: str
    in_flight: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return self.where + (f", in {' and '.join(op for op, _ in self.in_flight)}" if self.in_flight else "")


@dataclass(slots=True)
class _Question:
    """One error that asks for the notes of all ranks."""

    cause: str
    answer: str = ""
    answered: threading.Event = field(default_factory=threading.Event)


class Lookout:
    """Keeps the note of this rank, and reads those of others.

    Args:
        store: used by nobody else.
        prefix: begins the names of its keys; the same on `ranks`, and never used before.
        rank, ranks: this one, and all that share the plan.
        timeout_s: of collectives.
    """

    def __init__(self, store: Store, prefix: str, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._tick_s = min(SUSPICION_S, timeout_s / SUSPICIONS_A_TIMEOUT)
        self._questions: list[_Question] = []
        self._noted: tuple[str, ...] = ()
        self._is_closing = False
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, place: Callable[[], Place], fail: Callable[[ExecutionError], None]) -> None:
        """Begin; before any rank can ask.

        Args:
            place: where this rank is now; called from a thread.
            fail: gets the error when another rank gave up for which an op of this one waits; called from a thread.
        """
        self._place = place
        self._fail = fail
        self._note(str(place()))
        self._thread = threading.Thread(target=self._serve, name="commplan-lookout", daemon=True)
        self._thread.start()

    def explain(self, error: ExecutionError) -> ExecutionError:
        """The error with what is known of every rank added to its message; takes `PATIENCE_S` at most.

        The other ranks get to know that this one gives up.
        """
        question = _Question(str(error))
        self._questions.append(question)
        self._awake.set()
        question.answered.wait(PATIENCE_S)
        seen = question.answer or "The store with the notes of other ranks does not answer: the process that holds it is gone."
        explained = type(error)(f"{error} {seen}")
        explained.__cause__ = error
        return explained

    def close(self) -> None:
        """End the thread."""
        for ending in self.let_go():
            ending.join()

    def let_go(self) -> Sequence[Ending]:
        """Let the thread end by itself; see `Lanes.let_go`."""
        self._is_closing = True
        return [Ending(self._thread, self._awake.set)] if self._thread is not None else []

    # On the thread.

    def _serve(self) -> None:
        next_note_s = 0.0
        while not self._is_closing:
            try:
                while self._questions:
                    self._answer(self._questions.pop(0))
                if time.perf_counter() >= next_note_s:
                    self._note(str(self._place()))
                    next_note_s = time.perf_counter() + self._timeout_s / NOTES_A_TIMEOUT
                self._look_after_waits()
            except (RuntimeError, ValueError):
                # The store is gone. Collectives still time out, and say so without notes.
                return
            self._awake.wait(self._tick_s)
            self._awake.clear()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/place/{rank}"

    def _note(self, text: str) -> None:
        self._store.set(self._key(self._rank), json.dumps([time.time(), text]))

    def _cause(self) -> str:
        key = f"{self._prefix}/cause"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _look_after_waits(self) -> None:
        place, now_s = self._place(), time.perf_counter()
        waiting = tuple(op for op, begin_s in place.in_flight if now_s - begin_s > self._tick_s)
        if waiting and waiting != self._noted:
            self._note(str(place))
            logger.warning("%s: longer than %.1f s, %s", " and ".join(waiting), self._tick_s, place.where)
        self._noted = waiting
        if waiting and (cause := self._cause()):
            self._fail(ExecutionError(f"{' and '.join(waiting)} can't end: {cause}"))

    def _answer(self, question: _Question) -> None:
        mine = f"rank {self._rank} gave up: {question.cause}"
        key = f"{self._prefix}/cause"
        if not self._store.check([key]):
            self._store.compare_set(key, "", mine)
        op = _VERB.split(question.cause, maxsplit=1)[0]
        self._note(f"{self._place().where}, gave up on {textwrap.shorten(op, MAX_OP_LENGTH, placeholder='...')}")
        cause = self._cause()
        is_new = cause != mine and cause not in question.cause
        question.answer = (f"First {cause} " if is_new else "") + f"Ranks: {self._ranks_by_place()}."
        question.answered.set()

    def _ranks_by_place(self) -> str:
        now_s = time.time()
        ranks_at: dict[str, list[int]] = defaultdict(list)
        age_of: dict[str, float] = defaultdict(float)
        for rank, note in zip(self._ranks, self._store.multi_get([self._key(r) for r in self._ranks]), strict=True):
            written_s, text = json.loads(note)
            age_s = max(0.0, now_s - written_s)
            if age_s > 2 * self._timeout_s / NOTES_A_TIMEOUT:
                text = f"silent: stopped, gone or cut off; last {text}"
            ranks_at[text].append(rank)
            age_of[text] = max(age_of[text], age_s)
        return "; ".join(f"{listed(ranks)} {text} ({age_of[text]:.0f} s ago)" for text, ranks in ranks_at.items())
