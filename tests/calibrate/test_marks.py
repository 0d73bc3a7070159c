"""The clock of a device: compute is timed by events on its stream, and nobody waits for them until times are asked for."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import commplan
from commplan.calibrate.marks import DeviceClock, HostClock, Watch, clock_of
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

EVENT_MS = 4.0


class Device:
    """A device's module in torch, whose stream reaches an event `EVENT_MS` after the one before.

    Attributes:
        calls: of its events, in turn.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now_ms = 0.0

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._at_ms = -1.0
        self._is_passed = False

    def record(self) -> None:
        self._device.calls.append("record")
        self._device.now_ms += EVENT_MS
        self._at_ms = self._device.now_ms

    def synchronize(self) -> None:
        self._device.calls.append("synchronize")
        self._is_passed = True

    def elapsed_time(self, later: Event) -> float:
        assert later._is_passed, "a device is asked for what it has not passed"
        return later._at_ms - self._at_ms


def clock(device: Device) -> Any:
    with patch.object(torch, "get_device_module", lambda of: device):
        return clock_of(torch.device("cuda", 0))


def test_compute_of_a_device_is_timed_by_its_events() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    device = Device()
    of_device = clock(device)
    assert isinstance(of_device, DeviceClock)
    begin, end = of_device.now(), of_device.now()
    assert device.calls == ["record", "record"]
    # Milliseconds, in torch.
    assert of_device.seconds(begin, end) == pytest.approx(EVENT_MS / 1e3)
    assert device.calls == ["record", "record", "synchronize"]


def watched(here: Rank) -> tuple[list[str], list[Any]]:
    """What was asked of a device in two backwards, and their times."""
    device = Device()
    model = models.shard(models.fk(3), here.mesh((2, 2)))
    with (
        commplan.attach(model, "prefetch_overlap") as attachment,
        Watch(model, attachment.units, [unit.name for unit in attachment.units], clock(device)) as watch,
    ):
        for _ in range(2):
            model(torch.zeros(1, requires_grad=True)).sum().backward()
        asked = list(device.calls)
        return asked, watch.take()


def test_nobody_waits_for_a_device_while_it_computes(worlds: Worlds) -> None:
    for asked, times in worlds.of(4).run(watched):
        assert set(asked) == {"record"}
        assert len(times) == 2
        for of_backward in times:
            # One event's time from each hook to the next: of the first module its own backward; then what lies before it,
            # too; of the last also what lies before the end.
            assert list(of_backward.compute_s.values()) == pytest.approx([EVENT_MS / 1e3 * n for n in (1, 2, 3)])
            assert of_backward.hooks_s > 3 * EVENT_MS / 1e3
