"""Agreement between ranks before anything is touched, through the store that made the process group.

Nothing here is a collective of torch: a rank that never arrives, or arrives with something else, is named.  The last rank
to arrive compares for all, so that the store serves a number of requests that is linear in the ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from torch.distributed.distributed_c10d import Store

from commplan.errors import RankMismatchError
from commplan.execute.ranks import listed
from commplan.execute.stores import set_once

AGREED: Final = "agreed"

REFUSED: Final = "refused"
"""Key of a record by which a rank says why it will not go on."""

PATIENCE_S: Final = 2.0
"""How much longer than the slowest rank an outcome may take that somebody is about to find."""

_DIFFER: Final = "differ on "


def agree(store: Store, ranks: Sequence[int], rank: int, record: Mapping[str, str], timeout_s: float) -> str:
    """Compare `record` with every other rank's; all ranks call this as often as one another.

    Args:
        ranks: those that have to agree, the same on each of them.
        record: subject -> what this rank has, in words.  With the one key REFUSED: this rank gives up, and says why; it
            does not wait for the others.
        timeout_s: how long to wait for the slowest.

    Returns:
        A name for this agreement that no other one has, equal on these ranks.

    Raises:
        RankMismatchError: names the ranks that differ and the first subject on which they do, those that refused, or those
            that did not come.
    """
    scope = "commplan/" + hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:12]
    is_refusal = REFUSED in record
    name = f"{scope}/{store.add(f'{scope}/turn/{rank}', 1)}"
    while store.check([f"{name}/outcome"]):
        # The others gave this rank up: it takes part in their next attempt, if it has something to attach.
        if is_refusal:
            return name
        name = f"{scope}/{store.add(f'{scope}/turn/{rank}', 1)}"
    # Only digests travel as long as ranks agree.
    told = record if is_refusal else {subject: hashlib.sha256(text.encode()).hexdigest() for subject, text in record.items()}
    meeting = _Meeting(store, ranks, rank, name, timeout_s)
    meeting.tell(told, _outcome)
    if is_refusal:
        return name
    outcome = meeting.outcome()
    if outcome.startswith(_DIFFER):
        subject = outcome.removeprefix(_DIFFER)
        absent = f"ranks disagree on {subject}; rank(s) {{}} went away before they said what they have"
        details = _Meeting(store, ranks, rank, f"{name}/details", PATIENCE_S + timeout_s / 10, absent)
        details.tell({subject: record[subject]} if subject in record else {}, difference)
        outcome = details.outcome()
    if outcome != AGREED:
        raise RankMismatchError(outcome)
    return name


def confirm(store: Store, ranks: Sequence[int], rank: int, agreement: str, timeout_s: float, refusal: str = "") -> None:
    """Tell the others that this rank has done what was agreed on, and wait until all have; or that it could not, and why.

    Args:
        ranks, rank, timeout_s: as for `agree`.
        agreement: what that returned; each one is confirmed once.
        refusal: why this rank could not; it does not wait for the others.

    Raises:
        RankMismatchError: names the ranks that could not, or did not come.
    """
    meeting = _Meeting(store, ranks, rank, f"{agreement}/confirmed", timeout_s)
    meeting.tell({REFUSED: refusal} if refusal else {}, _outcome)
    if not refusal and (outcome := meeting.outcome()) != AGREED:
        raise RankMismatchError(outcome)


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Each rank tells something; one outcome for all, which says what came of it, or who did not come (`absent`)."""

    store: Store
    ranks: Sequence[int]
    rank: int
    name: str
    timeout_s: float
    absent: str = "rank(s) {} did not attach within {:g} s; every rank has to call attach, as often as the others"

    def tell(self, record: Mapping[str, str], judge: Callable[[Mapping[int, Mapping[str, str]]], str]) -> None:
        """Tell `record`; whoever is the last to tell judges all of them."""
        self.store.set(self._key(self.rank), json.dumps(record))
        if self.store.add(f"{self.name}/arrived", 1) == len(self.ranks):
            self._decide(judge({r: json.loads(self.store.get(self._key(r))) for r in self.ranks}))

    def outcome(self) -> str:
        """Wait for what was decided."""
        # Of ranks that lose patience together one calls the roll: each asks for the note of every rank.
        if not self._is_decided(self.timeout_s) and (self._is_first_to_give_up() or not self._is_decided(PATIENCE_S)):
            missing = [r for r in self.ranks if not self.store.check([self._key(r)])]
            self._decide(
                self.absent.format(listed(missing), self.timeout_s)
                if missing
                else f"ranks were not compared within {self.timeout_s:g} s: the last one to attach ended, or is slow"
            )
        return str(self.store.get(f"{self.name}/outcome").decode())

    def _is_decided(self, timeout_s: float) -> bool:
        try:
            self.store.wait([f"{self.name}/outcome"], timedelta(seconds=timeout_s))
        except RuntimeError:
            return False
        return True

    def _is_first_to_give_up(self) -> bool:
        return self.store.add(f"{self.name}/gave up", 1) == 1

    def _decide(self, outcome: str) -> None:
        """Whoever is first decides for all: a rank that gives up must not leave others that go on."""
        set_once(self.store, f"{self.name}/outcome", outcome)

    def _key(self, rank: int) -> str:
        return f"{self.name}/{rank}"


def _outcome(digests: Mapping[int, Mapping[str, str]]) -> str:
    """AGREED, which ranks refused, or the subject on which ranks differ."""
    if told := _refusals(digests):
        return told
    subject = _first_subject(digests)
    return AGREED if subject is None else f"{_DIFFER}{subject}"


def difference(records: Mapping[int, Mapping[str, str]]) -> str:
    """Which ranks refused, or the first thing on which they differ, in words; empty if they agree."""
    if told := _refusals(records):
        return told
    subject = _first_subject(records)
    if subject is None:
        return ""
    values = {r: record.get(subject) for r, record in records.items()}
    usual, _ = Counter(values.values()).most_common(1)[0]
    odd = [r for r, value in values.items() if value != usual]
    rest = [r for r, value in values.items() if value == usual]
    mine, theirs = _first_difference(values[odd[0]] or "", usual or "")
    return f"ranks disagree on {subject}: rank(s) {listed(odd)} have {mine}, rank(s) {listed(rest)} have {theirs}"


def _refusals(records: Mapping[int, Mapping[str, str]]) -> str:
    refused = {r: record[REFUSED] for r, record in records.items() if REFUSED in record}
    if not refused:
        return ""
    rank, reason = next(iter(refused.items()))
    return f"rank(s) {listed(list(refused))} could not attach; rank {rank} says: {reason}"


def _first_subject(records: Mapping[int, Mapping[str, str]]) -> str | None:
    """What ranks differ on first."""
    subjects = dict.fromkeys(subject for record in records.values() for subject in record)
    return next((s for s in subjects if len({record.get(s) for record in records.values()}) > 1), None)


def _first_difference(one: str, other: str, limit: int = 200) -> tuple[str, str]:
    """The first differing lines of two texts."""
    for a, b in zip(one.splitlines(), other.splitlines(), strict=False):
        if a != b:
            return repr(a[:limit]), repr(b[:limit])
    longer = max(one, other, key=len).splitlines()
    shorter = min(len(one.splitlines()), len(other.splitlines()))
    extra = repr(longer[shorter][:limit]) if shorter < len(longer) else "more"
    return (f"{extra} besides", "nothing there") if len(one) > len(other) else ("nothing there", f"{extra} besides")
