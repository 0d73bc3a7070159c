"""The stream path on a recording device: bit-equal to stock FSDP2 however late its streams run, and every access in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch

import commplan
from commplan.execute.happens_before import check
from commplan.execute.streams import StreamLanes
from tests.devices.fake import Pace
from tests.devices.recording import Device
from tests.worlds import parity
from tests.worlds.world import Rank, Worlds

APPLY_ON_A_LANE_OF_ITS_OWN: Final = """
version: 1
name: apply_on_a_lane
summary: Apply on a third lane, beside everything else.
lanes:
  outer: {priority: high}
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
  - apply_n: {after: AR_n, lane: outer}
"""

SCHEDULES: Final[Sequence[parity.Schedule]] = (*parity.LIBRARY, (APPLY_ON_A_LANE_OF_ITS_OWN, {}))

STEPS: Final = [parity.PLAIN, parity.NO_SYNC, parity.NO_ALL_REDUCE]


def in_order(here: Rank, name: str, pace: Pace, sharding: dict[str, Any], schedules: Sequence[parity.Schedule]) -> None:
    """Every schedule on the recording device against stock FSDP2."""
    problem = parity.PROBLEMS[name]
    expected = list(parity.train(parity.build(problem, here, (2, 2), sharding), problem, here.rank, STEPS))
    for schedule, params in schedules:
        device = Device(pace, seed=1)
        model = parity.build(problem, here, (2, 2), sharding)
        with device.at_work(), commplan.attach(model, schedule, options=device.options, **params) as attachment:
            for number, grads in enumerate(parity.train(model, problem, here.rank, STEPS, device.read)):
                parity.assert_equal(grads, expected[number], f"{name} under {schedule}, step {number}")
            report = attachment.last_backward
            assert report is not None
            assert report.peak_bytes <= report.declared_peak_bytes
            entries = list(device.log.entries)
        assert len(entries) > 100
        assert not (problems := check(entries)), (schedule, problems[:4])


@pytest.mark.parametrize("pace", list(Pace))
@pytest.mark.parametrize(("name", "bf16"), [("FN twice", True), ("FN", False)])
def test_every_schedule(worlds: Worlds, name: str, bf16: bool, pace: Pace) -> None:
    schedules = SCHEDULES if name == "FN twice" else SCHEDULES[::3]
    worlds.of(4).run(in_order, name=name, pace=pace, sharding={"bf16": bf16}, schedules=schedules)


@pytest.mark.parametrize("name", ["FN unused", "FN reversed", "FN plain input"])
def test_modules_that_come_otherwise(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(in_order, name=name, pace=Pace.RANDOM, sharding={}, schedules=SCHEDULES[::4])


def on_other_streams(here: Rank, pace: Pace, schedule: str) -> list[str]:
    """Hooks and the end of backward find different streams current; what is wrong with the log."""
    problem = parity.PROBLEMS["FN"]
    expected = list(parity.train(parity.build(problem, here, (2, 2), {"bf16": True}), problem, here.rank, [parity.PLAIN] * 2))
    device = Device(pace)
    model = parity.build(problem, here, (2, 2), {"bf16": True})
    others = [device.fake.compute_stream() for _ in range(2)]
    # A hook on the output of a block stands for a part of the model that computes on a stream of its own.
    for block, stream in zip(model.b, others, strict=False):  # type: ignore[arg-type, call-overload]
        block.register_full_backward_pre_hook(lambda *_, stream=stream: _switch(device, stream))
    with device.at_work(), commplan.attach(model, schedule, options=device.options) as attachment:

        def read(model: torch.nn.Module) -> dict[str, Any]:
            # Autograd gives its caller back the stream that it had, behind all of backward.
            _switch(device, device.fake.home)
            return device.read(model)

        for number, grads in enumerate(parity.train(model, problem, here.rank, [parity.PLAIN] * 2, read)):
            parity.assert_equal(grads, expected[number], f"step {number}")
        assert attachment.last_backward is not None
        entries = list(device.log.entries)
    streams = {e.stream for e in entries if e.stream.startswith("compute")}
    assert len(streams) == 3
    return check(entries)


def _switch(device: Device, stream: Any) -> None:
    """From here on `stream` is current, behind what was current before, as autograd sees to it."""
    event = device.fake.Event()
    before = device.module.current_stream(torch.device("cpu"))
    device.fake._current.record_event(event)
    device.fake._current = stream
    stream.wait_event(event)
    device.log.join(device.module.current_stream(torch.device("cpu")).name, before.name)


@pytest.mark.parametrize("schedule", ["pipelined_allreduce", "fsdp2_native"])
def test_hooks_on_different_streams(worlds: Worlds, schedule: str) -> None:
    assert worlds.of(4).run(on_other_streams, pace=Pace.RANDOM, schedule=schedule) == [[]] * 4


def unjoined(here: Rank, which: str) -> list[str]:
    """The same where streams are joined only on the way in, or only on the way out."""
    original = StreamLanes._join

    def join(self: StreamLanes, later: Any, earlier: Any) -> None:
        is_way_in = later == self._home
        if is_way_in != (which == "in"):
            original(self, later, earlier)

    with patch.object(StreamLanes, "_join", join):
        return on_other_streams(here, Pace.EAGER, "pipelined_allreduce")


@pytest.mark.parametrize("which", ["in", "out"])
def test_hooks_on_different_streams_race_where_they_are_not_joined(worlds: Worlds, which: str) -> None:
    assert all(worlds.of(4).run(unjoined, which=which))
