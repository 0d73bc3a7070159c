"""Agreement between ranks before anything is touched, through the store that made the process group.

Nothing here is a collective of torch: a rank that never arrives, or arrives with something else, is named.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from commplan.errors import RankMismatchError
from commplan.execute.ranks import listed

AGREED = "agreed"

REFUSED = "refused"
"""Key of a record by which a rank says why it will not go on."""


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
    name = f"{scope}/{store.add(f'{scope}/turn/{rank}', 1)}"
    # The others gave this rank up: it takes part in their next attempt.
    while store.check([f"{name}/outcome"]):
        name = f"{scope}/{store.add(f'{scope}/turn/{rank}', 1)}"
    keys = {r: f"{name}/{r}" for r in ranks}
    store.set(keys[rank], json.dumps(record))
    if REFUSED in record:
        return name
    outcome = AGREED
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [r for r in ranks if not store.check([keys[r]])]
        outcome = (
            f"rank(s) {listed(missing)} did not attach within {timeout_s:g} s; "
            "every rank has to call attach, as often as the others"
        )
    if outcome == AGREED:
        records = {r: json.loads(store.get(keys[r])) for r in ranks}
        problem = difference(records)
        if problem:
            raise RankMismatchError(problem)
    # Whoever is first decides for all: a rank that gives up must not leave others that go on.
    outcome = store.compare_set(f"{name}/outcome", "", outcome).decode()
    if outcome != AGREED:
        raise RankMismatchError(outcome)
    return name


def difference(records: Mapping[int, Mapping[str, str]]) -> str:
    """The first thing on which ranks differ, in words; empty if they agree."""
    refused = {r: record[REFUSED] for r, record in records.items() if REFUSED in record}
    if refused:
        rank, reason = next(iter(refused.items()))
        return f"rank(s) {listed(list(refused))} could not attach; rank {rank} says: {reason}"
    subjects = dict.fromkeys(subject for record in records.values() for subject in record)
    for subject in subjects:
        values = {r: record.get(subject, "nothing") for r, record in records.items()}
        usual, _ = Counter(values.values()).most_common(1)[0]
        odd = [r for r, value in values.items() if value != usual]
        if odd:
            rest = [r for r, value in values.items() if value == usual]
            mine, theirs = _first_difference(values[odd[0]], usual)
            return f"ranks disagree on {subject}: rank(s) {listed(odd)} have {mine}, rank(s) {listed(rest)} have {theirs}"
    return ""


def _first_difference(one: str, other: str, limit: int = 200) -> tuple[str, str]:
    """The first differing lines of two texts."""
    for a, b in zip(one.splitlines(), other.splitlines(), strict=False):
        if a != b:
            return repr(a[:limit]), repr(b[:limit])
    longer = max(one, other, key=len).splitlines()
    shorter = min(len(one.splitlines()), len(other.splitlines()))
    extra = repr(longer[shorter][:limit]) if shorter < len(longer) else "more"
    return (f"{extra} besides", "nothing there") if len(one) > len(other) else ("nothing there", f"{extra} besides")
