"""Which sizes are measured and what they tell of larger ones; what a device is given to do ahead; what ends a measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commplan.calibrate import sweep
from commplan.calibrate.collectives import Collective
from commplan.calibrate.statistics import rising_line
from commplan.calibrate.sweep import Limits, Sweep, Swept, failing
from commplan.errors import CollectiveTimeoutError, ExecutionError
from commplan.execute.lanes import Task
from commplan.language.profiles import Transfer
from commplan.ops import Axis, Kind
from commplan.sight.intervals import Interval


def collective(largest_bytes: int, total_bytes: int, make: Callable[..., Collective] = Collective) -> Collective:
    group, unit = SimpleNamespace(size=lambda: 2), SimpleNamespace(device=torch.device("cpu"))
    return make(
        axis=Axis.SHARD,
        kind=Kind.REDUCE_SCATTER,
        dtype="float32",
        group=cast(Any, group),
        largest_bytes=largest_bytes,
        total_bytes=total_bytes,
        unit=cast(Any, unit),
    )


largest = st.one_of(st.integers(1 << 14, 1 << 28), st.integers(7, 14).map(lambda k: 4**k + 4096))
"""Bytes of a module, often right above a step, as of a weight with its bias."""


@given(largest, st.floats(1, 40))
def test_no_size_is_near_another(largest_bytes: int, modules: float) -> None:
    sizes = collective(largest_bytes, int(modules * largest_bytes)).sizes()
    assert all(b > 1.9 * a for a, b in pairwise(sizes))
    assert any(abs(size - largest_bytes) < 8 for size in sizes)
    assert sizes[-1] <= max(largest_bytes, modules * largest_bytes)
    assert all(size % 8 == 0 for size in sizes)


@given(largest, st.integers(1, 12), st.floats(1e8, 1e11), st.data())
def test_what_ops_of_several_modules_take_is_not_left_to_chance(
    largest_bytes: int, modules: int, speed: float, data: st.DataObject
) -> None:
    """Times that are 2 % off at most: so are those of all modules at once, but for a little."""
    sizes = collective(largest_bytes, modules * largest_bytes).sizes()
    off = data.draw(st.lists(st.floats(-0.02, 0.02), min_size=len(sizes), max_size=len(sizes)))
    line, _ = rising_line([(size, (1 + part) * size / speed) for size, part in zip(sizes, off, strict=True)])
    if len(line) == 1:
        return
    found = sum(Transfer(points=tuple(line)).seconds(modules * largest_bytes))
    assert found == pytest.approx(modules * largest_bytes / speed, rel=0.25)


@dataclass
class Paced:
    """A device that takes its time, and a host that issues to it: both in seconds since the begin."""

    host_s: float = 0.0
    device_s: float = 0.0
    blocks_host: bool = False
    failure: Exception | None = None
    is_timed: bool = False
    intervals: list[Interval] = field(default_factory=list)
    num_in_row: list[int] = field(default_factory=list)

    ISSUE_S = 50e-6
    FILL_S = 30e-6

    def open(self, lane: str, priority: str) -> None:
        pass

    def compute(self) -> Any:
        self.is_timed = True
        return nullcontext()

    def submit(self, lane: str, task: Task, waits: Sequence[Any]) -> None:
        self.host_s += self.ISSUE_S
        begin_s = self.does(0.0)
        task.start()
        if task.is_communication and self.is_timed:
            self.intervals.append(Interval(task.op, lane, begin_s, self.device_s, None))

    def does(self, seconds: float) -> float:
        """The device, once it has done what was issued before."""
        self.device_s = max(self.device_s, self.host_s) + seconds
        return self.device_s

    def fill(self) -> None:
        self.host_s += self.FILL_S / 10
        self.does(self.FILL_S)

    def wait(self, tokens: Sequence[Any]) -> None:
        pass

    def take_intervals(self) -> tuple[Sequence[Interval], Sequence[Interval]]:
        taken, self.intervals, self.is_timed = self.intervals, [], False
        self.num_in_row.append(len(taken))
        self.host_s = max(self.host_s, self.device_s)
        return taken, ()

    def rest(self) -> None:
        pass


class Alone:
    """A meeting of one rank."""

    def __init__(self) -> None:
        self.given_up: list[BaseException] = []

    def conclude(self, value: Any, conclude: Callable[[list[Any]], Any], what: str) -> Any:
        return conclude([value])

    def give_up(self, error: BaseException) -> None:
        self.given_up.append(error)


class Stub(Collective):
    """Says where it is without a process group."""

    @property
    def ranks(self) -> str:
        return "shard group of rank 0"


def swept(monkeypatch: pytest.MonkeyPatch, lanes: Any, takes: Callable[[int], Callable[[], None]], **changes: Any) -> Swept:
    monkeypatch.setattr(sweep, "time", SimpleNamespace(perf_counter=lambda: lanes.host_s))
    monkeypatch.setattr(sweep, "_meeting_on", lambda one: lambda: None)
    monkeypatch.setattr(Stub, "prepare", lambda self, size_bytes: takes(size_bytes))
    sweeping = Sweep([collective(1 << 14, 1 << 16, Stub)], lanes, cast(Any, Alone()), Limits(1.0, 5.0))
    sweeping._ahead._buffer = cast(Any, SimpleNamespace(zero_=lambda: lanes.fill()))
    found = Swept()
    sweeping.run(found)
    return found


def test_on_a_device_small_collectives_take_no_longer_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the device a tenth of what it takes the host to issue it."""
    lanes = Paced()
    found = swept(monkeypatch, lanes, lambda size_bytes: lambda: cast(None, lanes.does(5e-6)))
    for points in found.points.values():
        assert [point.size_bytes for point in points] == [1 << 12, 1 << 14, 1 << 15, 1 << 16]
        for point in points:
            assert point.spread.median_s == pytest.approx(5e-6)


def test_slow_collectives_are_measured_some_in_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ranks which end apart weigh less."""
    lanes = Paced()
    found = swept(monkeypatch, lanes, lambda size_bytes: lambda: cast(None, lanes.does(0.5)))
    points = found.points[Axis.SHARD, Kind.REDUCE_SCATTER]
    assert all(point.spread.median_s == pytest.approx(0.5) for point in points)
    # One to try what it does ahead, two alone for each size, and at least three batches.
    assert sorted(lanes.num_in_row) == [1] * (1 + 2 * len(points)) + [2] * (3 * len(points))
    assert [point.in_row for point in points] == [2] * len(points)


def test_where_there_is_no_memory_for_several_modules_they_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Paced()

    def takes(size_bytes: int) -> Callable[[], None]:
        if size_bytes > 1 << 15:
            raise torch.OutOfMemoryError("no memory")
        return lambda: cast(None, lanes.does(1e-3))

    found = swept(monkeypatch, lanes, takes)
    assert [point.size_bytes for point in found.points[Axis.SHARD, Kind.REDUCE_SCATTER]] == [1 << 12, 1 << 14, 1 << 15]
    assert found.notes == ["reduce_scatter over the shard axis of 65536 bytes was left out: a rank has no memory for it"]


class Stuck(Sequence[Interval]):
    """Intervals of a device that does not get there, as lanes of streams give them."""

    def __len__(self) -> int:
        raise ExecutionError("the device did not reach the end of a backward within 5 s")

    def __getitem__(self, at: Any) -> Any:
        return self.__len__()

    def __iter__(self) -> Iterator[Interval]:
        return iter(range(len(self)))  # type: ignore[arg-type]


def test_a_device_that_stalls_is_told_by_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Paced()
    taken = lanes.take_intervals

    def stuck() -> Any:
        return (Stuck(), ()) if any("bytes" in one.op for one in lanes.intervals) else taken()

    monkeypatch.setattr(lanes, "take_intervals", stuck)
    told = "reduce_scatter over the shard axis of 4096 bytes on shard group of rank 0 did not end within 5.0 s"
    with pytest.raises(CollectiveTimeoutError, match=told):
        swept(monkeypatch, lanes, lambda size_bytes: lambda: None)


@pytest.mark.parametrize("error", [ExecutionError("stalled"), torch.OutOfMemoryError("no memory"), ValueError("mine")])
def test_whatever_ends_a_measurement_is_told_to_the_others(error: Exception) -> None:
    meeting = Alone()
    with pytest.raises(type(error)), failing(cast(Any, meeting)):
        raise error
    assert meeting.given_up == [error]
