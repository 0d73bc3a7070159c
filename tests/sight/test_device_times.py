"""Times that a device tells: on the host's clock within the error that is stated, in reports as everywhere."""

from __future__ import annotations

import time

import torch

from commplan.execute.lanes import Task
from commplan.execute.streams import DeviceHooks, StreamLanes
from commplan.execute.timeline import LazyIntervals, Span, Timeline
from commplan.sight.figures import describe_backward
from commplan.sight.report import BackwardReport
from tests.devices.fake import FakeModule, Pace

# The device's clock: another zero, a little delay before the host sees an event.
ZERO_S = 12345.0
DELAY_S = 0.002


class Event:
    """A timed event on an idle device."""

    def __init__(self) -> None:
        self.host_s = time.perf_counter()

    def query(self) -> bool:
        return time.perf_counter() > self.host_s + DELAY_S

    def elapsed_time(self, later: Event) -> float:
        # Two steps by way of the device's own clock, in milliseconds.
        return ((later.host_s - ZERO_S) - (self.host_s - ZERO_S)) * 1e3


def test_device_times_are_right_to_the_stated_error() -> None:
    timeline = Timeline(Event(), Event, 60.0)
    events = []
    for _ in range(3):
        events.append(Event())
        time.sleep(0.001)
    issued, begin, end = events
    timeline.add(Span("AR_0", "replicate", begin, end, issued))
    timeline.add(Span("4", "compute", begin, end), is_wait=True)
    ops = LazyIntervals(timeline, is_wait=False)
    report = BackwardReport(0.0, 1.0, ops, LazyIntervals(timeline, is_wait=True), 0, 0, 1)
    assert report.clock_error_s >= DELAY_S
    (op,), (wait,) = report.ops, report.compute_waits
    for found, event in ((op.issued_s, issued), (op.begin_s, begin), (op.end_s, end), (wait.end_s, end)):
        assert found is not None
        assert abs(found - event.host_s) <= report.clock_error_s
    assert (wait.op, wait.issued_s) == ("4", None)
    described = describe_backward(report, 0, None)
    assert described.device_clock_error_s == report.clock_error_s
    assert "times of the device are right to" in str(described)


def test_streams_tell_what_compute_waited_at_and_when_ops_were_issued() -> None:
    fake = FakeModule(Pace.EAGER)
    lanes = StreamLanes(torch.device("cpu"), 60.0, DeviceHooks(module=fake))
    lanes.open("replicate", "normal")
    entered: list[str] = []

    class Range:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *raised: object) -> None:
            entered.append("out")

    def start() -> None:
        entered.append("start")

    with lanes.compute():
        task = Task("AR_0", "b", "the group", start, lambda: entered.append("finish"), around=Range)
        token = lanes.submit("replicate", task, [])
        lanes.wait([token], "7")
        ops, waits = lanes.take_intervals()
    (op,), (wait,) = ops, waits
    assert entered == ["in", "start", "finish", "out"]
    assert (op.op, op.lane, wait.op, wait.lane) == ("AR_0", "replicate", "7", "compute")
    assert op.issued_s is not None
    assert op.issued_s <= op.begin_s <= op.end_s <= wait.end_s
    lanes.close()
