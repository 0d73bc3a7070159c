"""Lanes as worker threads: order, waits, failures, stuck collectives, and no thread left behind."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest

from commplan.errors import CollectiveTimeoutError, ExecutionError
from commplan.execute.lanes import Task
from commplan.execute.workers import WorkerLanes

PATIENCE_S = 60


def nothing() -> None:
    """No work."""


def task(start: Callable[[], object] = nothing, finish: Callable[[], None] = nothing, op: str = "AR_3") -> Task:
    return Task(op, "b.1", "the group of ranks [0, 2]", start, finish)  # type: ignore[arg-type]


class Handle:
    """A collective that ends when told to, or fails as gloo does."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self, timeout: timedelta) -> None:
        if not self.over.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for the peer")


@pytest.fixture
def lanes() -> Iterator[WorkerLanes]:
    before = set(threading.enumerate())
    made = WorkerLanes(PATIENCE_S)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t not in before and t.name.startswith("commplan")]


def test_random_programs_keep_order_and_waits(lanes: WorkerLanes) -> None:
    """Each task sees that its predecessor on the lane and all that it waits for are over."""
    draw = random.Random(0)
    over: list[bool] = []
    tokens = []
    broken: list[int] = []
    last: dict[str, int] = {}
    for number in range(300):
        lane = draw.choice(("shard", "replicate", "outer"))
        waits = draw.sample(range(number), min(number, draw.randint(0, 3)))
        before = [*waits, *([last[lane]] if lane in last else [])]

        def start(before: list[int] = before, number: int = number) -> None:
            if not all(over[b] for b in before):
                broken.append(number)

        def finish(number: int = number) -> None:
            over[number] = True

        over.append(False)
        if draw.random() < 0.2:
            draw.choice((lanes.hold_back, lanes.hand_over))()
        tokens.append(lanes.submit(lane, task(start, finish, f"op_{number}"), [tokens[w] for w in waits]))
        last[lane] = number
        if draw.random() < 0.05:
            lanes.wait([tokens[-1]])
            assert over[number]
    lanes.wait(tokens)
    assert all(over)
    assert not broken
    ops, _ = lanes.take_intervals()
    assert len(ops) == 300
    for lane in last:
        ends = [(i.begin_s, i.end_s) for i in ops if i.lane == lane]
        assert all(a[1] <= b[0] for a, b in pairwise(ends))


def test_compute_goes_on_beside_a_collective_and_waits_are_recorded(lanes: WorkerLanes) -> None:
    handle = Handle()
    token = lanes.submit("shard", task(lambda: handle), [])
    other = lanes.submit("replicate", task(), [])
    lanes.wait([other])
    assert not token.done
    threading.Timer(0.05, handle.over.set).start()
    lanes.wait([token])
    ops, waits = lanes.take_intervals()
    assert {i.lane for i in ops} == {"shard", "replicate"}
    assert waits[-1].lane == "compute"
    assert lanes.take_intervals() == ((), ())


@pytest.mark.parametrize("end", ["hand over", "wait", "drain"])
def test_what_is_held_back_starts_when_it_is_handed_over_or_compute_waits(lanes: WorkerLanes, end: str) -> None:
    begun: list[str] = []
    all_begun = threading.Event()
    before = lanes.submit("shard", task(lambda: begun.append("before")), [])
    lanes.wait([before])
    lanes.hold_back()
    first = lanes.submit("shard", task(lambda: begun.append("first")), [before])
    then = lanes.submit("replicate", task(lambda: begun.append("then"), all_begun.set), [first])
    # Nothing has to be waited for.
    lanes.wait([before])
    time.sleep(0.05)
    assert begun == ["before"]
    if end == "wait":
        lanes.wait([then])
    elif end == "drain":
        lanes.drain()
    else:
        lanes.hand_over()
        assert all_begun.wait(PATIENCE_S)
        # And so does what comes next.
        next_begun = threading.Event()
        lanes.submit("outer", task(next_begun.set), [])
        assert next_begun.wait(PATIENCE_S)
    assert begun == ["before", "first", "then"]


def test_what_is_held_back_waits_for_its_turn(lanes: WorkerLanes) -> None:
    """Handed over, it starts behind what it waits for; what is opened by another task's end is not held back."""
    handle, begun = Handle(), threading.Event()
    running = lanes.submit("shard", task(lambda: handle), [])
    lanes.hold_back()
    behind = lanes.submit("shard", task(begun.set), [])
    alone = threading.Event()
    lanes.submit("replicate", task(alone.set), [])
    lanes.hand_over()
    assert alone.wait(PATIENCE_S)
    assert not begun.is_set()
    lanes.hold_back()
    handle.over.set()
    assert begun.wait(PATIENCE_S)
    lanes.wait([running, behind])


def test_close_drops_what_is_held_back() -> None:
    ran: list[int] = []
    lanes = WorkerLanes(PATIENCE_S)
    lanes.hold_back()
    lanes.submit("shard", task(lambda: ran.append(1)), [])
    lanes.close()
    assert not ran


def test_placeholders_are_no_communication(lanes: WorkerLanes) -> None:
    lanes.wait([lanes.submit("shard", Task("RS_0", "", "", nothing, nothing, is_communication=False), [])])
    assert lanes.take_intervals()[0] == ()


def fails() -> None:
    raise ValueError("out of luck")


@pytest.mark.parametrize("part", ["start", "finish"])
def test_a_failure_reaches_compute_and_stops_every_lane(lanes: WorkerLanes, part: str) -> None:
    ran: list[str] = []
    all_queued = threading.Event()

    def fails_later() -> None:
        all_queued.wait(PATIENCE_S)
        fails()

    failing = lanes.submit("shard", task(**{part: fails_later}, op="RS_1"), [])
    dependent = lanes.submit("replicate", task(lambda: ran.append("dependent")), [failing])
    all_queued.set()
    with pytest.raises(ExecutionError, match=r"RS_1 of module 'b\.1' on the group of ranks \[0, 2\] failed: out of luck"):
        lanes.wait([dependent])
    assert not ran
    assert isinstance(lanes.failure, ExecutionError)
    for call in (lambda: lanes.wait([]), lambda: lanes.submit("shard", task(), [])):
        with pytest.raises(ExecutionError, match="RS_1"):
            call()
    lanes.drain()


def test_a_collective_that_times_out_is_named() -> None:
    lanes = WorkerLanes(0.2)
    token = lanes.submit("replicate", task(Handle), [])
    with pytest.raises(CollectiveTimeoutError, match=r"AR_3 of module 'b\.1' on the group of ranks \[0, 2\]"):
        lanes.wait([token])
    lanes.drain()
    lanes.close()


def test_a_worker_that_hangs_is_given_up() -> None:
    """Even where the collective does not honour its own timeout."""
    stuck = threading.Event()
    lanes = WorkerLanes(0.2)
    token = lanes.submit("replicate", task(stuck.wait), [])
    with pytest.raises(CollectiveTimeoutError, match="AR_3"):
        lanes.wait([token])
    lanes.drain()
    lanes.close()
    stuck.set()


def test_drain_returns_when_all_is_over(lanes: WorkerLanes) -> None:
    ended: list[int] = []
    for number in range(5):
        lanes.submit("shard", task(lambda: time.sleep(0.01), lambda number=number: ended.append(number)), [])
    lanes.drain()
    assert ended == [0, 1, 2, 3, 4]


def test_close_drops_what_is_queued(lanes: WorkerLanes) -> None:
    handle, ran = Handle(), []
    lanes.submit("shard", task(lambda: handle), [])
    lanes.submit("shard", task(lambda: ran.append(1)), [])
    threading.Timer(0.05, handle.over.set).start()
    lanes.close()
    assert not ran


def test_idle_lanes_keep_no_buffer(lanes: WorkerLanes) -> None:
    """A finished task must not be referenced: its closure holds buffers."""
    import weakref

    class Buffer:
        pass

    buffer = Buffer()
    alive = weakref.ref(buffer)
    lanes.wait([lanes.submit("shard", task(lambda kept=buffer: None), [])])
    lanes.drain()
    del buffer
    deadline_s = time.monotonic() + PATIENCE_S
    while alive() is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert alive() is None


def test_failure_is_not_raised_by_close(lanes: WorkerLanes) -> None:
    token = lanes.submit("shard", task(fails), [])
    with suppress(ExecutionError):
        lanes.wait([token])
    lanes.close()


def test_what_waits_for_the_threads_of_lanes_keeps_nothing_else_alive() -> None:
    """It is kept until Python ends, and lanes lead to tasks, and these to models."""
    lanes = WorkerLanes(PATIENCE_S)
    begun, over = threading.Event(), Handle()

    def start() -> Handle:
        begun.set()
        return over

    lanes.submit("shard", task(start), [])
    buffer = Handle()
    lanes.submit("shard", task(partial(vars, buffer)), [])
    assert begun.wait(PATIENCE_S)
    (ending,) = lanes.let_go()
    returns_s = ending.returns_s()
    assert returns_s is not None
    assert 0 < returns_s - time.perf_counter() <= PATIENCE_S
    references = [weakref.ref(lanes), weakref.ref(buffer)]
    del lanes, buffer
    over.over.set()
    ending.thread.join(PATIENCE_S)
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert ending.returns_s() is None
