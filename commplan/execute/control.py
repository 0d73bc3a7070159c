"""Agreement between ranks on what each of them did: tiny all-gathers on a group and a thread of their own."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.distributed as dist

from commplan.errors import CollectiveTimeoutError, DivergenceError, ExecutionError
from commplan.execute.ending import Ending
from commplan.execute.ranks import listed
from commplan.execute.waiting import wait_in_slices

# A rank that is missing is told by the op that misses it.
PATIENCE_S = 0.3


class Message(IntEnum):
    """What a rank is telling: its first number in every exchange, so that two kinds can't be mistaken for each other."""

    BACKWARD = 1
    MODULE_ORDER = 2
    REDUCTION = 3


@dataclass(slots=True)
class Check:
    """One exchange, under way or over.

    Attributes:
        name: what is compared, in words.
        before: what begins only after this exchange, in words; it is told in errors.
        tell: gets the error as soon as there is one, on the thread of the exchanges.
    """

    name: str
    message: Message
    number: int
    record: Sequence[str]
    before: str
    tell: Callable[[ExecutionError], None] | None
    over: threading.Event = field(default_factory=threading.Event)
    error: ExecutionError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return self.over.is_set()

    def wait(self) -> None:
        """Return when all ranks have been found equal.

        Raises:
            DivergenceError: they are not; names ranks and the first difference.
            CollectiveTimeoutError: a rank did not come.
            ExecutionError: the exchange failed otherwise.
        """
        self.over.wait()
        if self.error is not None:
            raise self.error


class Control:
    """Compares records of what ranks did, one exchange after another, beside everything else.

    After an exchange that failed, every later one fails alike: ranks may have lost count of each other.

    Args:
        group: a CPU (gloo) group of every rank that shares the plan, used by nothing else.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._timeout_s = timeout_s
        self._num_exchanges = 0
        self._queue: queue.SimpleQueue[Check | None] = queue.SimpleQueue()
        self._failure: ExecutionError | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="commplan-control", daemon=True)
        self._thread.start()

    def begin(
        self,
        message: Message,
        record: Sequence[str],
        *,
        before: str = "",
        tell: Callable[[ExecutionError], None] | None = None,
    ) -> Check:
        """Compare `record` (lines in words) with the other ranks'; returns at once.

        All ranks have to begin the same exchanges in the same order; where they do not, the exchange finds out.  Only a
        digest travels as long as they agree.
        """
        self._num_exchanges += 1
        number = self._num_exchanges
        check = Check(f"{_words(message)} {number}", message, number, tuple(record), before, tell)
        self._queue.put(check)
        return check

    def agree(self, message: Message, record: Sequence[str]) -> None:
        """Begin, and wait. Raises as `Check.wait` does."""
        self.begin(message, record).wait()

    def close(self) -> None:
        """End the thread. One that hangs in an exchange is left behind; it is a daemon and touches nothing any more."""
        self.let_go().join()

    def let_go(self) -> Ending:
        """Let the thread end by itself; see `Lanes.let_go`."""
        self._is_closing = True
        self._queue.put(None)
        return Ending(self._thread)

    def _serve(self) -> None:
        while (check := self._queue.get()) is not None:
            if self._failure is None:
                try:
                    self._exchange(check)
                except ExecutionError as error:
                    self._failure = type(error)(f"{check.before} did not begin: {error}") if check.before else error
            check.error = self._failure
            check.over.set()
            if check.error is not None and check.tell is not None:
                check.tell(check.error)

    def _exchange(self, check: Check) -> None:
        digest = hashlib.sha256("\n".join(check.record).encode()).digest()
        mine = torch.tensor([check.message, check.number, int.from_bytes(digest[:8], "big", signed=True)])
        theirs = [torch.empty_like(mine) for _ in self._ranks]
        group = f"the control group of ranks {listed(self._ranks)}"
        limit_s = self._timeout_s + PATIENCE_S
        try:
            work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
            assert work is not None
            if not wait_in_slices(work, limit_s, lambda: self._is_closing):
                raise CollectiveTimeoutError(
                    f"rank check {check.number} ({_words(check.message)}) on {group} did not end within {limit_s:.1f} s: "
                    "a rank did not come to it. Gradients of this step are not to be used."
                )
            if any(not torch.equal(mine, other) for other in theirs):
                self._explain(check)
        except ExecutionError:
            raise
        except Exception as error:
            raise ExecutionError(f"rank check {check.number} ({_words(check.message)}) on {group} failed: {error}") from error

    def _explain(self, check: Check) -> None:
        """Exchange the records themselves, and raise what is found."""
        records: list[Sequence[str]] = [()] * len(self._ranks)
        dist.all_gather_object(records, [_words(check.message), *check.record], group=self._group)
        raise DivergenceError(describe_divergence(check.name, dict(zip(self._ranks, records, strict=True))))


def describe_divergence(subject: str, record_of: dict[int, Sequence[str]]) -> str:
    """Who differs from most ranks, and at which line first."""
    common = list(Counter(tuple(r) for r in record_of.values()).most_common(1)[0][0])
    odd = [rank for rank, record in record_of.items() if list(record) != common]
    if not odd:
        return f"ranks disagree on {subject}: they are at different backwards or found different module orders"
    other = list(record_of[odd[0]])
    at = next((i for i, (a, b) in enumerate(zip(common, other, strict=False)) if a != b), min(len(common), len(other)))
    usual = common[at] if at < len(common) else "nothing more"
    found = other[at] if at < len(other) else "nothing more"
    rest = [rank for rank in record_of if rank not in odd]
    return (
        f"ranks disagree on {subject}: rank(s) {listed(odd)} have {found!r} where rank(s) {listed(rest)} have {usual!r}. "
        "Gradients of this step are not to be used."
    )


def _words(message: Message) -> str:
    return message.name.lower().replace("_", " ")
