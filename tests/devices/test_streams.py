"""Lanes of streams, part by part, on the recording device."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from commplan.errors import CollectiveTimeoutError, ExecutionError
from commplan.execute.events import EventPool
from commplan.execute.lanes import Task
from commplan.execute.streams import DeviceHooks, StreamLanes
from tests.devices.fake import FakeModule, Pace

CPU = torch.device("cpu")
PATIENCE_S = 60


def nothing() -> None:
    """No work."""


def task(start: Callable[[], Any] = nothing, finish: Callable[[], None] = nothing, op: str = "AR_3", group: Any = None) -> Task:
    return Task(op, "b.1", "the group of ranks [0, 2]", start, finish, process_group=group)


@pytest.fixture
def device() -> FakeModule:
    return FakeModule(Pace.LATE)


def lanes_of(device: FakeModule, timeout_s: float = PATIENCE_S, abort: Any = None) -> StreamLanes:
    lanes = StreamLanes(CPU, timeout_s, DeviceHooks(device, abort or (lambda group: None)))
    for name, priority in (("shard", "normal"), ("replicate", "high")):
        lanes.open(name, priority)
    return lanes


@pytest.fixture
def lanes(device: FakeModule) -> Iterator[StreamLanes]:
    made = lanes_of(device)
    yield made
    with made.compute():
        made.drain()
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "commplan-watchdog"]


def test_the_host_issues_and_does_not_wait(device: FakeModule, lanes: StreamLanes) -> None:
    ran: list[str] = []

    def put(name: str) -> Callable[[], None]:
        return lambda: device.current_stream(CPU).enqueue(lambda: ran.append(name))

    with lanes.compute():
        first = lanes.submit("shard", task(put("RS"), op="RS_3"), [])
        last = lanes.submit("replicate", task(put("AR")), [first])
        assert not ran
        assert not last.event.query()
        lanes.wait([last])
    assert ran == ["RS", "AR"]
    assert not lanes.blocks_host


def test_priorities_are_those_of_the_plan(device: FakeModule, lanes: StreamLanes) -> None:
    lanes.open("shard", "high")
    assert [stream.priority for stream in device._lanes] == [0, -1]


def test_times_are_read_when_asked_for_and_lie_within_the_backward(lanes: StreamLanes) -> None:
    with lanes.compute():
        token = lanes.submit("shard", task(op="RS_0"), [])
        lanes.submit("replicate", Task("AR_0", "", "", nothing, nothing, is_communication=False), [token])
        lanes.wait([token])
        ops, waits = lanes.take_intervals()
    assert not ops.timeline.is_done  # type: ignore[attr-defined]
    assert [(i.op, i.lane) for i in ops] == [("RS_0", "shard")]
    assert ops.timeline.is_done  # type: ignore[attr-defined]
    assert len(waits) == 1
    assert waits[0].lane == "compute"
    # The device's clock ticks once an event.
    assert waits[0].begin_s - ops[0].begin_s == pytest.approx(0.001, abs=0.0021)
    assert ops[0].begin_s < ops[0].end_s < waits[0].end_s
    assert ops.timeline.clock_error_s < PATIENCE_S  # type: ignore[attr-defined]


def test_a_wait_that_is_known_to_be_over_is_not_repeated(lanes: StreamLanes) -> None:
    with lanes.compute():
        first = lanes.submit("shard", task(), [])
        second = lanes.submit("shard", task(), [first])
        lanes.wait([second])
        lanes.wait([first, lanes.mark()])
        assert len(lanes.take_intervals()[1]) == 1


class Reader:
    is_done = False


def test_events_come_back_when_the_device_passed_them_and_nobody_asks(device: FakeModule) -> None:
    pool, reader, lane = EventPool(device), Reader(), device.Stream(CPU)
    taken = [pool.take(), pool.take(timed=True)]
    fence = device.Event()
    lane.record_event(fence)
    pool.retire(fence, reader)
    assert pool.reclaim() == -1
    lane.run_all()
    assert pool.reclaim() == -1
    reader.is_done = True
    assert pool.reclaim() == 0
    assert [pool.take(), pool.take(timed=True)] == taken
    assert pool.take() not in taken
    pool.forget()
    assert pool.take() not in taken


def test_a_collective_that_never_ends_is_named_and_its_groups_aborted() -> None:
    """By a thread: the host issued everything and went on."""
    device, aborted, told = FakeModule(Pace.LATE), [], threading.Event()
    stuck, other = object(), object()

    def abort(group: Any) -> None:
        aborted.append(group)
        if len(aborted) == 2:
            told.set()

    lanes = lanes_of(device, 0.2, abort)
    with lanes.compute():
        before = lanes.submit("shard", task(op="RS_3"), [])
        lanes.wait([before])
        begin_s = time.perf_counter()
        token = lanes.submit("replicate", task(group=stuck), [before])
        lanes.submit("shard", task(op="RS_4", group=other), [token])
    assert told.wait(PATIENCE_S)
    assert time.perf_counter() - begin_s >= 0.2
    assert set(aborted) == {stuck, other}
    assert isinstance(lanes.failure, CollectiveTimeoutError)
    assert "AR_3 of module 'b.1' on the group of ranks [0, 2]" in str(lanes.failure)
    assert [words for words, _ in lanes.in_flight()] == ["AR_3 of module 'b.1' on the group of ranks [0, 2]"]
    with lanes.compute():
        for call in (lambda: lanes.wait([token]), lambda: lanes.submit("shard", task(), [])):
            with pytest.raises(CollectiveTimeoutError, match="AR_3"):
                call()
        lanes.drain()
    lanes.close()


def test_the_thread_of_lanes_that_are_let_go_ends_and_nobody_wakes_it(device: FakeModule) -> None:
    lanes = lanes_of(device)
    with lanes.compute():
        lanes.submit("shard", task(), [])
        lanes.drain()
    (ending,) = lanes.let_go()
    reference = weakref.ref(lanes)
    del lanes
    deadline_s = time.monotonic() + PATIENCE_S
    while [t for t in threading.enumerate() if t.name == "commplan-watchdog"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    ending.join()
    gc.collect()
    assert reference() is None


def test_an_op_whose_predecessors_run_is_not_blamed() -> None:
    """The first of a chain is, not the second, though both take as long."""
    device = FakeModule(Pace.LATE)
    lanes = lanes_of(device, 0.1)
    with lanes.compute():
        first = lanes.submit("shard", task(op="RS_0"), [])
        lanes.submit("replicate", task(op="AR_0"), [first])
    deadline_s = time.monotonic() + PATIENCE_S
    while lanes.failure is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert "RS_0" in str(lanes.failure)
    with lanes.compute():
        lanes.drain()
    lanes.close()


def test_what_can_not_be_issued_is_named(lanes: StreamLanes) -> None:
    def fails() -> None:
        raise RuntimeError("out of luck")

    with lanes.compute():
        with pytest.raises(ExecutionError, match=r"AR_3 of module 'b\.1' on the group of ranks \[0, 2\] failed: out of luck"):
            lanes.submit("replicate", task(fails), [])
        with pytest.raises(ExecutionError, match="out of luck"):
            lanes.wait([])


def test_other_current_streams_are_joined_both_ways(device: FakeModule, lanes: StreamLanes) -> None:
    home, guest = device.home, device.compute_stream()
    with lanes.compute():
        assert device._current is home
    with device.stream(guest):
        with lanes.compute():
            assert device._current is home
        assert device._current is guest
        with lanes.compute():
            lanes.take_intervals()
            lanes.rest()
        with lanes.compute():
            assert device._current is guest
