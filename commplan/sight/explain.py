"""Why collectives were exposed: what compute waited for and where, what an op was queued behind, which peers were late."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from commplan.errors import Span
from commplan.language.modules import Module
from commplan.ops import Section
from commplan.plan.model import Hook, OpStep, Plan, Step
from commplan.plan.wire import members_of
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport, step_of

# A delay that is a smaller part of the exposed time does not explain it.
MIN_SHARE = 0.1

MAX_WAITS_TOLD = 2
MAX_OPS_TOLD = 3

TAIL = "tail: nothing left to hide behind"

ADVICE = (
    ("compute waited for it", "a wait one module later"),
    ("in the way of ", "another lane, or another order"),
    (TAIL, "smaller last modules, or less behind the last hook"),
    ("on its lane", "another lane"),
    ("on its communicator", "`communicator: own` for its lane"),
    ("which it comes after", "issue the earlier one sooner, or split it: it needs its data"),
    ("peers arrived", "look at the rank that was last"),
    ("FSDP2's all-gather", "a schedule that gathers parameters, as prefetch_overlap does"),
)
"""What stands in a reason, and what to try then."""


def advice(reason: str) -> str:
    """What to try against one of the reasons of an exposed op; "" where it cost nothing."""
    return next((text for words, text in ADVICE if words in reason), "")


@dataclass(frozen=True, slots=True)
class Run:
    """A collective as it ran.

    Attributes:
        turn: how often the op had run before in this backward.
        step: where the plan has it; None for one that the plan does not know.
        previous: the collective before it on its lane.
        last_peer: when its last peer arrived (seconds on this rank's clock), and which rank that was; None if not known.
    """

    interval: Interval
    turn: int
    step: OpStep | None
    previous: Run | None
    last_peer: tuple[float, int] | None

    @property
    def peers_span(self) -> tuple[float, float]:
        """When it waited for peers. Empty if it was last itself."""
        begin_s, end_s = self.interval.begin_s, self.interval.end_s
        arrived_s = begin_s if self.last_peer is None else self.last_peer[0]
        return begin_s, max(begin_s, min(end_s, arrived_s))


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait of compute: what it was told to wait for, and in which hook; no step: the end of root, or what `words` say."""

    begin_s: float
    end_s: float
    words: str
    step: Step | None
    hook: Hook | None

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.step is None else tuple(map(str, dict.fromkeys((*self.step.after, *self.step.waits))))

    @property
    def is_tail(self) -> bool:
        return not self.words and (self.hook is None or self.hook.section is Section.ROOT)


class Explainer:
    """Looks through one backward.

    Args:
        last_peers: by op, and for each time it ran: when its last peer arrived, and the rank; {} if nobody asked peers.
        error_s: how far times of peers may be off.
    """

    def __init__(
        self, report: BackwardReport, last_peers: Mapping[str, Sequence[tuple[float, int]]] | None = None, error_s: float = 0.0
    ) -> None:
        self._report = report
        self._last_peers = last_peers or {}
        self._error_s = error_s
        self._blocked: dict[int, Mapping[int, str]] = {}

    @cached_property
    def runs(self) -> Sequence[Run]:
        """The collectives, lane by lane in the order in which they ran."""
        runs: list[Run] = []
        turns: dict[str, int] = defaultdict(int)
        previous: dict[str, Run] = {}
        for interval in self._report.ops:
            turn = turns[interval.op]
            turns[interval.op] += 1
            arrivals = self._last_peers.get(interval.op, ())
            last_peer = arrivals[turn] if turn < len(arrivals) else None
            run = Run(interval, turn, self._step_of.get(interval.op), previous.get(interval.lane), last_peer)
            previous[interval.lane] = run
            runs.append(run)
        return runs

    def module_of(self, run: Run) -> str:
        """The name of the module that an op belongs to, the first of several."""
        return "" if run.step is None else self._members(run.step)[0].name or "(root)"

    def exposed_s(self, run: Run) -> float:
        """Seconds in which it ran while compute stood still."""
        return sum(_overlap_s(run, wait) for wait in self._during(run))

    def reasons(self, run: Run) -> tuple[str, ...]:
        """Why it was exposed, in words; nothing for an op that was hidden."""
        exposed_s = self.exposed_s(run)
        if exposed_s <= 0:
            return ()
        return (*self._where(run), *self._queue(run, exposed_s), *self._peers(run, exposed_s))

    # Where compute stood still.

    def _where(self, run: Run) -> Iterator[str]:
        waits = sorted(self._during(run), key=lambda w: -_overlap_s(run, w))
        told = list(dict.fromkeys(self._relation(run, wait) for wait in waits))
        yield from told[:MAX_WAITS_TOLD]
        if len(told) > MAX_WAITS_TOLD:
            yield f"and {len(told) - MAX_WAITS_TOLD} more of this kind"

    def _relation(self, run: Run, wait: _Wait) -> str:
        if wait.is_tail:
            return TAIL
        if wait.words:
            return f"compute waited for {wait.words}, not for it"
        place = self._place(wait)
        if run.interval.op in wait.names:
            return f"compute waited for it in {place}"
        blocked = self._blocked_in(wait).get(id(run))
        if blocked is not None:
            return f"in the way of {blocked}, for which compute waited in {place}"
        return f"compute waited in {place}, not for it"

    def _place(self, wait: _Wait) -> str:
        """`post_backward of layers.3 (wait: AR_4, FILE:LINE)`."""
        assert wait.hook is not None
        assert wait.step is not None
        assert self._plan is not None
        what = str(wait.step.op) if isinstance(wait.step, OpStep) else f"wait: {_listed(wait.names)}"
        return f"{wait.hook.section.value} of {_module(self._plan, wait.hook.module)} ({what}{_at(wait.step.span)})"

    def _blocked_in(self, wait: _Wait) -> Mapping[int, str]:
        """The runs (by `id`) that had to end before compute could go on, each with the op waited for that they held up.

        Only runs that overlap with the wait are looked at, and each wait is looked at once.
        """
        if id(wait) not in self._blocked:
            blocked: dict[int, str] = {}
            reached = [(name, run) for name in wait.names for run in self._ends_of(name)]
            while reached:
                name, run = reached.pop()
                if id(run) not in blocked and _overlap_s(run, wait) > 0:
                    blocked[id(run)] = name
                    reached.extend((name, earlier) for earlier, _ in self._before(run))
            self._blocked[id(wait)] = blocked
        return self._blocked[id(wait)]

    def _ends_of(self, name: str) -> Sequence[Run]:
        """The collectives that an op ends with: its own, or for one that is none those that it comes after."""
        if name in self._runs_of or name not in self._step_of:
            return self._runs_of.get(name, ())
        return [run for op in self._step_of[name].after for run in self._runs_of.get(str(op), ())]

    # What an op was queued behind.

    def _queue(self, run: Run, exposed_s: float) -> Iterator[str]:
        issued_s = run.interval.issued_s
        before = max(self._before(run), key=lambda b: b[0].interval.end_s, default=None)
        if issued_s is None or before is None:
            return
        delay_s = before[0].interval.end_s - issued_s
        if delay_s > MIN_SHARE * exposed_s:
            yield f"queued behind {before[0].interval.op} {before[1]} for {_ms(delay_s)}"

    def _before(self, run: Run) -> Iterator[tuple[Run, str]]:
        """What had to end before `run` could begin, and why."""
        if run.previous is not None:
            yield run.previous, "on its lane"
        if run.step is None or run.turn > 0:
            return
        for op in dict.fromkeys((*run.step.after, *run.step.waits)):
            for earlier in self._runs_of.get(str(op), ()):
                if earlier is not run and earlier is not run.previous and earlier.turn == 0:
                    yield earlier, "which it comes after" if op in run.step.after else "on its communicator"

    # Peers.

    def _peers(self, run: Run, exposed_s: float) -> Iterator[str]:
        begin_s, end_s = run.peers_span
        if run.last_peer is not None and end_s - begin_s > max(self._error_s, MIN_SHARE * exposed_s):
            yield f"peers arrived {_ms(end_s - begin_s)} later (rank {run.last_peer[1]} last)"

    # The report, indexed.

    @property
    def _plan(self) -> Plan | None:
        return self._report.plan

    @cached_property
    def _members(self) -> Callable[[OpStep], list[Module]]:
        assert self._plan is not None
        return members_of(self._plan)

    @cached_property
    def _runs_of(self) -> Mapping[str, Sequence[Run]]:
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            found[run.interval.op].append(run)
        return found

    @cached_property
    def _step_of(self) -> Mapping[str, OpStep]:
        return {} if self._plan is None else {str(s.op): s for s in self._plan.steps if isinstance(s, OpStep)}

    @cached_property
    def _waits(self) -> Sequence[_Wait]:
        """One after another: compute is in one place at a time."""
        places: dict[str, tuple[Step, Hook]] = {}
        for hook in () if self._plan is None else self._plan.hooks:
            for step in hook.steps:
                places[str(len(places))] = (step, hook)
        intervals = sorted(self._report.compute_waits, key=lambda i: i.begin_s)
        return [
            _Wait(i.begin_s, i.end_s, i.op if step_of(i) is None else "", *places.get(i.op, (None, None))) for i in intervals
        ]

    @cached_property
    def _wait_ends(self) -> Sequence[float]:
        return [wait.end_s for wait in self._waits]

    def _during(self, run: Run) -> Iterator[_Wait]:
        """The waits that overlap with it."""
        for i in range(bisect_right(self._wait_ends, run.interval.begin_s), len(self._waits)):
            if self._waits[i].begin_s >= run.interval.end_s:
                return
            yield self._waits[i]


def _overlap_s(run: Run, wait: _Wait) -> float:
    return max(0.0, min(run.interval.end_s, wait.end_s) - max(run.interval.begin_s, wait.begin_s))


def _module(plan: Plan, n: int) -> str:
    return plan.modules.modules[n].name or "(root)"


def _at(span: Span | None) -> str:
    return "" if span is None else f", {PurePath(span.file).name}:{span.line}"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - MAX_OPS_TOLD
    return ", ".join(names[:MAX_OPS_TOLD]) + (f" and {rest} more" if rest > 0 else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
