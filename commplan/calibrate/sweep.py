"""Collectives alone, over a range of sizes, on the process groups and with the reductions of an attached schedule.

Every batch begins with ranks meeting on the groups themselves, in the queue in which the collectives follow: the host need
not be on time, and all groups of an axis run at once, as in a backward.  A batch is the same collective some times in a row,
so that what differs at its begin and its end weighs little; what is left of ranks that arrive at different times is taken
out as `slowest_group` says.  A device is given something to do first, for as long as the host needs to issue a batch: else
small collectives would take as long as it takes to issue them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from commplan.calibrate.collectives import Collective, Start
from commplan.calibrate.meeting import Meeting
from commplan.calibrate.statistics import Spread, slowest_group
from commplan.errors import ExecutionError
from commplan.execute.lanes import Lanes, Task, Token, timeout_error
from commplan.ops import Axis, Kind

BATCH_S: Final = 0.03
"""What a batch takes, where one collective takes less."""

MIN_IN_ROW: Final = 2
MAX_IN_ROW: Final = 20
MAX_CROWDED: Final = 100
"""In a row beside those of the other axis."""

MIN_REPEATS: Final = 3
MAX_REPEATS: Final = 9

SHARED: Final = 1.1
"""From this ratio of its time beside the other axis' collective to its time alone on, a collective is taken to share a link."""


def nothing() -> None:
    """Arrive at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long it may take.

    Attributes:
        budget_s: about, for all sizes of all collectives; every size gets its least number of repetitions all the same.
        timeout_s: for one collective, or for another rank to come.
        arrive: what a rank does between the meeting and a batch.
    """

    budget_s: float = 60.0
    timeout_s: float = 60.0
    arrive: Callable[[], None] = nothing


@dataclass(frozen=True)
class Measured:
    """A collective at one size: bytes of the whole tensor on one rank; what one of `in_row` in a row takes."""

    size_bytes: int
    spread: Spread
    in_row: int = 1

    @property
    def jitter(self) -> float:
        """Of a single one, standard deviation over mean: some in a row, independent of each other, differ less."""
        return self.spread.jitter * math.sqrt(self.in_row)


@dataclass
class Swept:
    """What the sweep found.

    Attributes:
        points: (axis, kind) -> by ascending size.
        dtypes: what was sent.
        crowded: how many times as long the collectives of the two axes took beside one another; None where they never are.
        notes: what was left out, and why.
    """

    points: dict[tuple[Axis, Kind], list[Measured]] = field(default_factory=dict)
    dtypes: dict[tuple[Axis, Kind], str] = field(default_factory=dict)
    crowded: float | None = None
    notes: list[str] = field(default_factory=list)


class Ahead:
    """Keeps a device busy while the host issues a batch behind it, so that the batch then runs at the device's own pace.

    Where lanes block the host, each task is handed to a thread, and what that takes belongs to it in backward, too.
    """

    BUFFER_BYTES: Final = 1 << 27
    TRIAL: Final = 16
    MARGIN: Final = 2.0
    """Times what the host needed lately for a task."""

    MAX_FILLS: Final = 4096

    def __init__(self, lanes: Lanes, device: torch.device | None) -> None:
        self._lanes = lanes
        self._is_needed = not lanes.blocks_host and device is not None
        self._buffer = torch.empty(self.BUFFER_BYTES if self._is_needed else 0, dtype=torch.uint8, device=device)
        self._issue_s = 0.0
        self._gained_s = 0.0

    @contextmanager
    def of(self, lane: str, num_tasks: int) -> Iterator[None]:
        """Inside, a batch of `num_tasks` is issued on `lane`."""
        if self._gained_s > 0:
            num = min(self.MAX_FILLS, math.ceil(self.MARGIN * self._issue_s * num_tasks / self._gained_s))
            self._fill(lane, num)
        begin_s = time.perf_counter()
        yield
        self._issue_s = (time.perf_counter() - begin_s) / num_tasks

    def measure(self, lane: str) -> None:
        """By how much a device that fills memory falls behind the host at each fill."""
        if not self._is_needed:
            return
        with self._lanes.compute():
            self._fill(lane, 1)
            begin_s = time.perf_counter()
            token = self._fill(lane, self.TRIAL, is_communication=True)
            issued_s = time.perf_counter() - begin_s
            self._lanes.wait([token])
            (took, *_), _ = self._lanes.take_intervals()
            self._lanes.rest()
        self._gained_s = (took.end_s - took.begin_s - issued_s) / self.TRIAL

    def _fill(self, lane: str, num: int, *, is_communication: bool = False) -> Token:
        def start() -> None:
            for _ in range(num):
                self._buffer.zero_()

        task = Task("work that keeps the device busy", "", "this rank", start, nothing, is_communication)
        return self._lanes.submit(lane, task, ())


class Sweep:
    """Measures collectives on lanes of its own; all ranks do the same.

    Args:
        lanes: that nothing else uses, on a device that is idle.
    """

    def __init__(self, found: Sequence[Collective], lanes: Lanes, meeting: Meeting, limits: Limits) -> None:
        self._collectives = found
        self._lanes, self._meeting, self._limits = lanes, meeting, limits
        self._ahead = Ahead(lanes, found[0].unit.device if found else None)
        for axis in Axis:
            lanes.open(axis, "normal")
        groups = {one.axis: one for one in found}
        self._groups = [groups[axis] for axis in Axis if axis in groups]

    def run(self, swept: Swept) -> None:
        """Measure all of them into `swept`.

        Raises:
            ExecutionError: a collective did not end in time, or a rank did not come; names the collective, the group, ranks.
        """
        if self._groups:
            self._ahead.measure(self._groups[0].axis)
        end_s = time.perf_counter() + self._limits.budget_s
        left = sum(len(one.sizes()) for one in self._collectives)
        for one in self._collectives:
            swept.dtypes[one.axis, one.kind] = one.dtype
            points = swept.points[one.axis, one.kind] = []
            for size_bytes in one.sizes():
                if size_bytes <= one.own_bytes or self._fits(one, size_bytes):
                    points.append(self._point(one, size_bytes, (end_s - time.perf_counter()) / left))
                else:
                    swept.notes.append(f"{one} of {size_bytes} bytes was left out: a rank has no memory for it")
                left -= 1
        swept.crowded = self._crowded(swept)

    def _point(self, one: Collective, size_bytes: int, share_s: float) -> Measured:
        """One size, within about `share_s`."""
        what = f"{one} of {size_bytes} bytes"
        first_s = self._together(one, what, [self._batch(one, size_bytes, 1, what)], share_s)["median_s"]
        # The first pays for connections and memory, so that it tells little of a small one: again.
        known = self._together(one, what, [self._batch(one, size_bytes, 1, what)], share_s)
        once_s, share_s = min(first_s, known["median_s"]), known["share_s"]
        in_row = max(MIN_IN_ROW, min(MAX_IN_ROW, round(BATCH_S / max(once_s, 1e-9))))
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(share_s / max(in_row * once_s, 1e-9))))
        seconds = [self._batch(one, size_bytes, in_row, what) for _ in range(repeats)]
        found = self._together(one, what, seconds, share_s)
        return Measured(size_bytes, Spread(found["median_s"], found["low_s"], found["high_s"], found["num"]), in_row)

    def _fits(self, one: Collective, size_bytes: int) -> bool:
        """Whether every rank has memory for more than one module's."""
        try:
            one.prepare(size_bytes)
            fits = True
        except RuntimeError:
            fits = False
        return bool(self._meeting.conclude(fits, all, f"memory for {one} of {size_bytes} bytes"))

    def _together(self, one: Collective, what: str, seconds: Sequence[float], share_s: float) -> dict[str, Any]:
        """What ranks measured, as one figure; the first rank's share of time, so that all go on alike."""

        def conclude(values: list[Any]) -> dict[str, Any]:
            spread = slowest_group((group, of_rank) for group, of_rank, _ in values)
            found = {name: getattr(spread, name) for name in ("median_s", "low_s", "high_s", "num")}
            return found | {"share_s": values[0][2]}

        return dict(self._meeting.conclude([one.ranks, list(seconds), share_s], conclude, what))

    def _batch(self, one: Collective, size_bytes: int, in_row: int, what: str) -> float:
        """Seconds of one of `in_row` in a row, on this rank, from its own arrival on."""
        with self._lanes.compute():
            start = one.prepare(size_bytes)
            with self._ahead.of(one.axis, in_row):
                self._meet(one, what)
                tokens = [self._lanes.submit(one.axis, _task(one, what, start), ()) for _ in range(in_row)]
            return self._times(tokens[-1:], f"{what} on {one.ranks}")[one.axis] / in_row

    def _crowded(self, swept: Swept) -> float | None:
        """The largest of either axis, as many as take equally long, beside one another."""
        pair = [next((c for c in self._collectives if c.axis is axis and c.kind is not Kind.ALL_GATHER), None) for axis in Axis]
        first, second = pair
        if first is None or second is None:
            return None
        alone_s = {
            c.axis: point.spread.median_s
            for c in (first, second)
            for point in swept.points[c.axis, c.kind]
            if point.size_bytes == c.own_bytes
        }
        whole_s = max(BATCH_S, *(2 * seconds for seconds in alone_s.values()))
        in_row = {axis: max(1, min(MAX_CROWDED, round(whole_s / max(seconds, 1e-9)))) for axis, seconds in alone_s.items()}
        what = f"{first} beside {second}"

        def conclude(values: list[Any]) -> float:
            ratios = []
            for of_repeat in zip(*(seconds for _, seconds in values), strict=True):
                by_axis = {}
                for axis in (first.axis, second.axis):
                    seen = [(groups[axis], [seconds[axis]]) for (groups, _), seconds in zip(values, of_repeat, strict=True)]
                    by_axis[axis] = slowest_group(seen).median_s
                # The one that ends first had the other one beside it all the time.
                axis = min(by_axis, key=lambda axis: by_axis[axis])
                ratios.append(by_axis[axis] / (in_row[axis] * alone_s[axis]))
            return Spread.of(ratios).median_s

        seconds = [self._both(first, second, in_row, what) for _ in range(MIN_REPEATS)]
        groups = {c.axis: c.ranks for c in (first, second)}
        return float(self._meeting.conclude([groups, seconds], conclude, what))

    def _both(self, first: Collective, second: Collective, in_row: dict[Axis, int], what: str) -> dict[Axis, float]:
        with self._lanes.compute():
            starts = {c.axis: c.prepare(c.own_bytes) for c in (first, second)}
            tokens: list[Token] = []
            with self._ahead.of(first.axis, sum(in_row.values())):
                met = self._meet(first, what)
                for one in (first, second):
                    for _ in range(in_row[one.axis]):
                        tokens.append(self._lanes.submit(one.axis, _task(one, what, starts[one.axis]), (met,)))
            return self._times(tokens, f"{what} on {first.ranks}")

    def _meet(self, one: Collective, what: str) -> Token:
        """Ranks meet, on every axis, that of `one` last; then each arrives as it likes."""
        token: Token | None = None
        for other in sorted(self._groups, key=lambda group: group.axis is one.axis):
            start = _meeting_on(other)
            task = Task(f"the meeting before {what}", "", other.ranks, start, nothing, False, process_group=other.group)
            token = self._lanes.submit(one.axis, task, () if token is None else (token,))
        arrive = Task(f"the way to {what}", "", "this rank", self._arrive, nothing, is_communication=False)
        return self._lanes.submit(one.axis, arrive, ())

    def _arrive(self) -> None:
        self._limits.arrive()

    def _times(self, tokens: Sequence[Token], what: str) -> dict[Axis, float]:
        """By axis, from the begin of the first of its collectives to the end of the last."""
        self._lanes.wait(tokens)
        intervals, _ = self._lanes.take_intervals()
        self._lanes.rest()
        try:
            ops = list(intervals)
        except ExecutionError as error:
            # A device that does not get there names nothing.
            raise self._lanes.failure or timeout_error(what, self._limits.timeout_s) from error
        found = {}
        for axis in Axis:
            of_axis = [op for op in ops if op.lane == axis]
            if of_axis:
                found[axis] = max(op.end_s for op in of_axis) - min(op.begin_s for op in of_axis)
        if self._lanes.failure is not None:
            raise self._lanes.failure
        return found


def _task(one: Collective, what: str, start: Start) -> Task:
    return Task(what, "", one.ranks, start, nothing, process_group=one.group)


def _meeting_on(one: Collective) -> Start:
    tensor = torch.zeros(1, device=one.unit.device)
    return lambda: dist.all_reduce(tensor, group=one.group, async_op=True)


@contextmanager
def failing(meeting: Meeting) -> Iterator[None]:
    """Inside, what ends this rank's measurement is told to the others, who would wait for it."""
    try:
        yield
    except Exception as error:
        meeting.give_up(error)
        raise
