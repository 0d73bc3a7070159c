"""Looks for the schedule that the simulator finds fastest, under a cap on memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from commplan import compiler
from commplan.errors import CommplanError, ScheduleError
from commplan.language import library
from commplan.language.modules import ModuleTable
from commplan.language.profiles import Profile
from commplan.plan import Plan
from commplan.plan.model import OpStep
from commplan.simulate import Simulated, costs, draws, simulate
from commplan.tune.candidates import CHOICES, ROOT, Candidate

NEARLY = 5e-3
"""Times are compared in steps of this part, as predictions are no nearer. Within one the library wins, whose schedules people
know and have measured, then less memory, then the plainer one.
"""

ROUNDS = ((64, 4), (8, 16))
"""Under a profile with jitter so many schedules are drawn so often, and the best of them go to the next round; more often where
there are fewer than `FEW_MODULES`, since what comes late by chance is then not made up for by another time.
"""

FEW_MODULES = 16

SLACK = 0.02
"""Those that take longer without jitter by more than this part are not drawn."""

STARTS = (
    Candidate(),
    Candidate(gather=1),
    Candidate(all_reduce=1, apply=3, gather=1),
    Candidate(apply=3, apply_first=True, gather=1),
    Candidate(rs_fuse=2, ar_fuse=2, gather=1),
    Candidate(rs_chunks=2, ar_chunks=2, gather=1),
    Candidate(all_reduce=ROOT),
)
"""Where the search begins, one after the other."""

Tell = Callable[[int, float], None]
"""Told after each climb: how many schedules were tried, and seconds of the best."""


class NothingFitsError(CommplanError):
    """No schedule that was tried keeps the cap."""


@dataclass(frozen=True)
class Goal:
    """What is looked for.

    Attributes:
        memory_cap_bytes: the most communication memory of one rank; None: whatever it takes.
        bit_equal: only schedules whose sums are rounded as FSDP2 rounds them.
    """

    table: ModuleTable
    profile: Profile
    memory_cap_bytes: int | None = None
    bit_equal: bool = False


@dataclass(frozen=True)
class Found:
    """A schedule that keeps the cap, and how it would run.

    Attributes:
        simulated: without jitter.
        drawn_s: seconds of a backward with the profile's jitter, the mean of some draws; None: without.
    """

    text: str
    simulated: Simulated
    candidate: Candidate | None = None
    drawn_s: float | None = None

    @property
    def seconds(self) -> float:
        """Of a backward."""
        return self.simulated.duration_s if self.drawn_s is None else self.drawn_s

    @property
    def peak_bytes(self) -> int:
        """Of communication memory."""
        return self.simulated.plan.peak_bytes


@dataclass
class Search:
    """One search. Everything that was tried is remembered, and the same goal has the same result.

    Attributes:
        num_tried: schedules that were simulated.
    """

    goal: Goal
    name: str = "tuned"
    num_tried: int = 0
    _known: dict[Candidate, Found | None] = field(default_factory=dict)
    _ranking: list[Found] | None = None
    _best: Found | None = None

    def best(self, tell: Tell = lambda tried, seconds: None) -> Found:
        """The best of the library and of what a climb from each start finds.

        Raises:
            NothingFitsError: nothing keeps the cap.
            CommplanError: the profile does not say what something costs.
        """
        if self._best is None:
            best = self._look(tell)
            self._best = self._final() if self.goal.profile.has_jitter else best
        return self._best

    def _look(self, tell: Tell) -> Found:
        best = min(self.library_ranking(), key=self._rank, default=None)
        for start in STARTS:
            climbed = self._climb(start)
            best = min((found for found in (best, climbed) if found is not None), key=self._rank, default=None)
            if best is not None:
                tell(self.num_tried, best.seconds)
        if best is None:
            cap_bytes = self.goal.memory_cap_bytes
            raise NothingFitsError(f"no schedule keeps a cap of {cap_bytes} bytes: `commplan plan` tells what a module needs")
        return best

    @property
    def num_draws(self) -> int:
        """Of which predictions are means, where the profile has jitter."""
        return self._often(ROUNDS[-1][1])

    def library_ranking(self) -> list[Found]:
        """The schedules of the library that keep the cap and are as exact as asked for, the fastest first: with jitter, if the
        profile has any, once the best was asked for.
        """
        if self._ranking is None:
            texts = [library.find(name).read_text(encoding="utf-8") for name in library.names()]
            found = [one for one in map(self._try, texts) if one is not None and self._may_use(one.simulated.plan)]
            self._ranking = _fastest_first(found)
        return list(self._ranking)

    def leanest_beside(self, best: Found) -> Found | None:
        """Of what was tried and is in the same step of time as `best`, what takes the least memory, if that is less.

        A search under a cap of so much may come out elsewhere: it goes other ways.
        """
        of_best = self._rank(best)
        alike = [one for one in self._known.values() if one is not None and self._rank(one)[0] == of_best[0]]
        leanest = min(alike, key=self._rank, default=None)
        return leanest if leanest is not None and leanest.peak_bytes < best.peak_bytes else None

    def try_candidate(self, candidate: Candidate) -> Found | None:
        """How a candidate would run; None if it is no right schedule, or does not keep the cap."""
        if candidate not in self._known:
            is_allowed = candidate.is_bit_equal or not self.goal.bit_equal
            found = self._try(candidate.text(self.name, "A candidate.")) if is_allowed and _is_sound(candidate) else None
            self._known[candidate] = None if found is None else Found(found.text, found.simulated, candidate)
        return self._known[candidate]

    def _final(self) -> Found:
        """The best of the library and of what was tried, as jitter leaves them: who waits more is held up by more."""
        self._ranking = _fastest_first(self._drawn(one, self.num_draws) for one in self.library_ranking())
        tried = [one for one in self._known.values() if one is not None]
        limit_s = min((one.seconds for one in tried), default=0) * (1 + SLACK)
        # Of those that are as fast the plainest: memory, which orders a search, would leave those that wait most.
        left = sorted((one for one in tried if one.seconds <= limit_s), key=lambda one: (_oddity(one), one.seconds))
        for num, least_draws in ROUNDS:
            left = sorted((self._drawn(one, self._often(least_draws)) for one in left[:num]), key=self._rank)
        self._known |= {one.candidate: one for one in left if one.candidate is not None}
        return min((*self._ranking, *left), key=self._rank)

    def _often(self, least_draws: int) -> int:
        return max(least_draws, least_draws * FEW_MODULES // len(self.goal.table))

    def _drawn(self, found: Found, num_draws: int) -> Found:
        plan = found.simulated.plan
        return replace(found, drawn_s=draws(plan, costs(plan, self.goal.profile), num_draws).mean_s)

    def _climb(self, start: Candidate) -> Found | None:
        """From one candidate to the best of its neighbours, as long as that is better."""
        best, at = self.try_candidate(start), start
        while True:
            near = filter(None, map(self.try_candidate, at.neighbours()))
            better = min(near, key=self._rank, default=None)
            if better is None or better.candidate is None or (best is not None and self._rank(better) >= self._rank(best)):
                return best
            best, at = better, better.candidate

    def _rank(self, found: Found) -> tuple[float, bool, int, int, float]:
        """The lowest is the best: times in steps of `NEARLY`, then the library, then memory, then how plain it is, then times.

        An order without circles, so that a climb comes to its end.
        """
        ranking = self.library_ranking()
        unit_s = ranking[0].seconds if ranking and ranking[0].seconds > 0 else 1.0
        # The best of the library is the last of its step, so what comes out is never slower.
        steps = math.ceil(math.log(found.seconds / unit_s) / math.log1p(NEARLY) - 1e-9) if found.seconds > 0 else -math.inf
        return steps, found.candidate is not None, found.peak_bytes, _oddity(found), found.seconds

    def _try(self, text: str) -> Found | None:
        try:
            plan = compiler.compile(text, self.goal.table)
        except ScheduleError:
            return None
        cap_bytes = self.goal.memory_cap_bytes
        if cap_bytes is not None and plan.peak_bytes > cap_bytes:
            return None
        self.num_tried += 1
        return Found(text, simulate(plan, costs(plan, self.goal.profile)))

    def _may_use(self, plan: Plan) -> bool:
        """Whether a schedule of the library is as exact as asked for. Which dtype is sent is never for a search to say."""
        steps = [step for step in plan.steps if isinstance(step, OpStep)]
        is_bit_equal = all(step.op.pieces == 1 and step.op.first == step.op.last for step in steps)
        return all(step.dtype is None for step in steps) and (is_bit_equal or not self.goal.bit_equal)


def _fastest_first(found: Iterable[Found]) -> list[Found]:
    return sorted(found, key=lambda one: (one.seconds, one.peak_bytes))


def _is_sound(candidate: Candidate) -> bool:
    """Leaves out what can't be right, or is another one in other words."""
    reduced_at = candidate.all_reduce
    if reduced_at != ROOT and reduced_at < candidate.reduce_scatter:
        return False
    if candidate.apply != ROOT and (reduced_at == ROOT or candidate.apply < reduced_at):
        return False
    if candidate.apply == ROOT and candidate.apply_first:
        return False
    if candidate.tail and candidate.rs_fuse == candidate.ar_fuse == 1:
        return False
    return not (candidate.gather_alone and not candidate.gather)


def _oddity(found: Found) -> int:
    """How far a schedule is from the plainest; those of the library are plain."""
    if found.candidate is None:
        return 0
    return 1 + sum(CHOICES[name].index(getattr(found.candidate, name)) for name in CHOICES)
