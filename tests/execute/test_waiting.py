"""Waits of the host that no lane knows of."""

from __future__ import annotations

from commplan.execute.waiting import HostWaits
from commplan.sight.intervals import Interval


def wait(why: str, begin_s: float, end_s: float) -> Interval:
    return Interval(why, "compute", begin_s, end_s)


def test_they_are_told_among_those_of_the_plan_as_they_began() -> None:
    waits = HostWaits(counts=True)
    waits.add("b", 5.0, 6.0)
    waits.add("a", 1.0, 2.0)
    assert list(waits.among([wait("3", 3.0, 4.0)])) == [wait("a", 1.0, 2.0), wait("3", 3.0, 4.0), wait("b", 5.0, 6.0)]


def test_a_backward_begins_with_the_first_of_them() -> None:
    waits = HostWaits(counts=True)
    assert waits.begin_s(3.0) == 3.0
    waits.add("a", 1.0, 2.0)
    assert waits.begin_s(3.0) == 1.0


def test_what_was_cleared_belongs_to_no_backward() -> None:
    waits = HostWaits(counts=True)
    waits.add("a", 1.0, 2.0)
    waits.clear()
    assert waits.begin_s(3.0) == 3.0
    assert list(waits.among([])) == []


def test_on_a_device_compute_goes_on_while_the_host_waits() -> None:
    waits = HostWaits(counts=False)
    waits.add("a", 1.0, 2.0)
    of_plan = [wait("3", 3.0, 4.0)]
    assert waits.among(of_plan) is of_plan
    assert waits.begin_s(3.0) == 3.0
