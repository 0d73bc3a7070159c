"""Agreement between ranks on what each of them did: one tiny all-gather a backward, on a group of its own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from commplan.errors import CollectiveTimeoutError, DivergenceError
from commplan.execute.lanes import Task
from commplan.execute.ranks import listed

CONTROL_LANE = "control"

# A rank that is missing is told by the op that misses it.
PATIENCE_S = 0.3


class Message(IntEnum):
    """What a rank is telling: its first number in every exchange, so that two kinds can't be mistaken for each other."""

    BACKWARD = 1
    MODULE_ORDER = 2


class Control:
    """Compares records of what ranks did.

    Args:
        group: a CPU (gloo) group of every rank that shares the plan, used by nothing else.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._timeout = timedelta(seconds=timeout_s)
        self._num_exchanges = 0

    def task(self, message: Message, record: Sequence[str]) -> Task:
        """A task that compares `record` (lines in words) with the other ranks'.

        The task raises DivergenceError on every rank if any two records differ; only a digest travels as long as they agree.
        """
        self._num_exchanges += 1
        number = self._num_exchanges
        digest = hashlib.sha256("\n".join(record).encode()).digest()
        mine = torch.tensor([message, number, int.from_bytes(digest[:8], "big", signed=True)])
        theirs = [torch.empty_like(mine) for _ in self._ranks]

        def start() -> dist.Work | None:
            return dist.all_gather(theirs, mine, group=self._group, async_op=True)

        def finish() -> None:
            if any(not torch.equal(mine, other) for other in theirs):
                self._explain(f"{_words(message)} {number}", [_words(message), *record])

        group = f"the control group of ranks {listed(self._ranks)}"
        return Task(f"rank check {number}", "", group, start, finish, is_communication=False, patience_s=PATIENCE_S)

    def agree(self, message: Message, record: Sequence[str]) -> None:
        """Compare at once, on the calling thread. Raises as `task` does, and CollectiveTimeoutError if a rank does not come."""
        task = self.task(message, record)
        try:
            work = task.start()
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"ranks {listed(self._ranks)} could not compare their {_words(message)}: {error}; one did not reach this point"
            ) from error
        task.finish()

    def _explain(self, subject: str, record: Sequence[str]) -> None:
        records: list[Sequence[str]] = [()] * len(self._ranks)
        dist.all_gather_object(records, list(record), group=self._group)
        raise DivergenceError(describe_divergence(subject, dict(zip(self._ranks, records, strict=True))))


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
