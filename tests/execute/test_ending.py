"""Threads that were told to end: how long they are waited for, and which are left behind when Python ends."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from commplan.execute import ending
from commplan.execute.ending import Ending


@pytest.fixture
def leave() -> Iterator[threading.Event]:
    """Set by whoever lets the threads of a test end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "END_S", 0.05)


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is asked for when Python ends."""
    asked: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", asked.append)
    return asked


def waiting(event: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=event.wait, daemon=True)
    thread.start()
    return thread


def test_a_thread_that_is_woken_is_waited_for(leave: threading.Event, at_exit: list[Callable[[], object]]) -> None:
    told = Ending(waiting(leave), leave.set)
    told.join()
    assert not told.thread.is_alive()
    assert not at_exit


def test_one_that_does_not_end_is_waited_for_when_python_ends(
    leave: threading.Event, at_exit: list[Callable[[], object]]
) -> None:
    told = Ending(waiting(leave))
    told.join()
    assert told.thread.is_alive()
    (outlast,) = at_exit
    leave.set()
    outlast()
    assert not told.thread.is_alive()


def test_a_collective_that_is_over_soon_is_waited_for(leave: threading.Event) -> None:
    """Longer than a thread that is in none."""
    threading.Timer(1.0, leave.set).start()
    returns_s = time.perf_counter() + 10
    told = Ending(waiting(leave), returns_s=lambda: returns_s)
    told.outlast()
    assert not told.thread.is_alive()


def test_one_that_lasts_is_left_behind(leave: threading.Event) -> None:
    returns_s = time.perf_counter() + 600
    told = Ending(waiting(leave), returns_s=lambda: returns_s)
    told.outlast()
    assert told.thread.is_alive()


def test_one_that_should_have_returned_is_not_waited_for_again_and_again(leave: threading.Event) -> None:
    returns_s = time.perf_counter() - 600
    told = Ending(waiting(leave), returns_s=lambda: returns_s)
    told.outlast()
    assert told.thread.is_alive()
