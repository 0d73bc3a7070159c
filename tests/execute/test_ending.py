"""Threads that were told to end: how long they are waited for, and which are left behind when Python ends."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from commplan.execute import ending
from commplan.execute.collectives import nothing
from commplan.execute.ending import Ending, outlast
from commplan.execute.lanes import Task
from commplan.execute.machinery import Machinery
from commplan.execute.memory import Memory
from commplan.execute.workers import WorkerLanes


@pytest.fixture
def leave() -> Iterator[threading.Event]:
    """Set by whoever lets the threads of a test end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "END_S", 0.05)


class AtExit:
    """What is asked for when Python ends."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], object]] = []

    def register(self, function: Callable[..., object], *args: object) -> None:
        self.asked.append(partial(function, *args))

    def __call__(self) -> None:
        """Python ends."""
        (asked,) = self.asked
        asked()


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> AtExit:
    asked = AtExit()
    monkeypatch.setattr(atexit, "register", asked.register)
    return asked


def waiting(event: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=event.wait, daemon=True)
    thread.start()
    return thread


def test_a_thread_that_is_woken_is_waited_for(leave: threading.Event, at_exit: AtExit) -> None:
    told = Ending(waiting(leave), leave.set)
    told.join()
    assert not told.thread.is_alive()
    assert not at_exit.asked


def test_one_that_does_not_end_is_waited_for_when_python_ends(leave: threading.Event, at_exit: AtExit) -> None:
    told = Ending(waiting(leave))
    told.join()
    assert told.thread.is_alive()
    leave.set()
    at_exit()
    assert not told.thread.is_alive()


@pytest.mark.parametrize("limit_s", [10, 600])
def test_a_collective_that_is_over_soon_is_waited_for(leave: threading.Event, limit_s: float) -> None:
    """Longer than a thread that is in none, and whatever its limit."""
    threading.Timer(1.0, leave.set).start()
    returns_s = time.perf_counter() + limit_s
    told = Ending(waiting(leave), returns_s=lambda: returns_s)
    outlast([told])
    assert not told.thread.is_alive()


def test_those_that_last_are_left_behind(leave: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one time for all of them."""
    monkeypatch.setattr(ending, "AT_EXIT_S", 0.5)
    returns_s = time.perf_counter() + 600
    told = [Ending(waiting(leave), returns_s=lambda: returns_s) for _ in range(5)]
    begin_s = time.perf_counter()
    outlast(told)
    assert all(one.thread.is_alive() for one in told)
    assert time.perf_counter() - begin_s >= 0.5
    assert returns_s - time.perf_counter() > 590


def test_one_that_should_have_returned_is_not_waited_for_again_and_again(leave: threading.Event) -> None:
    returns_s = time.perf_counter() - 600
    told = Ending(waiting(leave), returns_s=lambda: returns_s)
    outlast([told])
    assert told.thread.is_alive()


def test_the_threads_of_machinery_that_nobody_ended_are_waited_for(leave: threading.Event, at_exit: AtExit) -> None:
    lanes = WorkerLanes(60)
    lanes.submit("shard", Task("RS_0", "m", "g", nothing, leave.wait), [])
    Machinery(lanes, Memory(), None).let_go_unattended()
    (thread,) = [ending.thread for ending in lanes.let_go()]
    assert thread.is_alive()
    threading.Timer(0.5, leave.set).start()
    at_exit()
    assert not thread.is_alive()
