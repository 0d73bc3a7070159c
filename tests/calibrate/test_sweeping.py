"""Sweeps over the groups of a job in four real processes: late ranks, a device of known pace, stalls."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import commplan
from commplan.calibrate import Limits
from commplan.calibrate.collectives import collectives
from commplan.calibrate.meeting import Meeting
from commplan.calibrate.sweep import Sweep, Swept
from commplan.errors import CollectiveTimeoutError, ExecutionError
from commplan.execute.agreement import agree
from commplan.execute.board import Board
from commplan.execute.lanes import Lanes
from commplan.execute.streams import DeviceHooks, StreamLanes
from commplan.fsdp2 import torch_faults, torch_private
from commplan.fsdp2.devices import lanes_for
from commplan.ops import Axis, Kind
from tests.devices.fake import FakeModule, Pace
from tests.worlds import models
from tests.worlds.world import Rank, Worlds


def workers(timeout_s: float) -> Lanes:
    return lanes_for(torch.device("cpu"), timeout_s)


def streams(timeout_s: float) -> Lanes:
    """Lanes of a device whose every event is a millisecond after the one before."""
    return StreamLanes(torch.device("cpu"), timeout_s, DeviceHooks(module=FakeModule(Pace.EAGER)))


def sweeping(
    here: Rank,
    *,
    arrive: Callable[[], None],
    timeout_s: float = 60.0,
    numel: int = 1 << 16,
    make_lanes: Callable[[float], Lanes] = workers,
) -> Swept:
    """A sweep over the groups of a model of one large weight."""
    torch.manual_seed(0)
    model = models.shard(nn.Sequential(nn.Linear(numel // 256, 256, bias=False)), here.mesh((2, 2)))
    with commplan.attach(model, "blocking", options=commplan.Options(timeout_s=timeout_s)) as attachment:
        store = torch_private.default_store()
        name = agree(store, range(4), here.rank, {"test": "sweep"}, 60.0)
        board = Board(lambda: torch_faults.own_store(store), name, here.rank, range(4))
        lanes = make_lanes(timeout_s)
        found = Swept()
        trained = [
            (unit, module)
            for unit in attachment.units
            for module in attachment.plan.modules.modules
            if module.name == unit.name
        ]
        limits = Limits(0.5, timeout_s, arrive)
        try:
            Sweep(collectives(trained, found.notes), lanes, Meeting(board, timeout_s), limits).run(found)
        finally:
            lanes.close()
        return found


def nap(rank: int, sleeper: int, seconds: float) -> None:
    if rank == sleeper:
        time.sleep(seconds)


SKEW_S = 0.25


class Overheard(Meeting):
    """Remembers what every rank saw."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[str, list[tuple[str, list[float]]]] = {}

    def conclude(self, value: Any, conclude: Callable[[list[Any]], Any], what: str) -> Any:
        def overhear(values: list[Any]) -> Any:
            # Of the last meeting on each size, that of all repetitions.
            self.seen[what] = [(of[0], of[1]) for of in values]
            return conclude(values)

        return super().conclude(value, overhear, what)


def skewed(here: Rank, sleeper: int) -> tuple[list[tuple[str, int, float]], dict[str, list[tuple[str, list[float]]]]]:
    seen: dict[str, list[tuple[str, list[float]]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "Meeting", lambda *args: overheard.append(Overheard(*args)) or overheard[0])
        overheard: list[Overheard] = []
        found = sweeping(here, arrive=partial(nap, here.rank, sleeper, SKEW_S))
        seen = overheard[0].seen
    points = [
        (f"{kind} over the {axis} axis of {p.size_bytes} bytes", p.size_bytes, p.spread.median_s)
        for (axis, kind), points in found.points.items()
        for p in points
    ]
    return points, seen


@pytest.mark.parametrize("sleeper", [0, 3])
def test_a_rank_that_arrives_late_is_not_taken_for_a_slow_network(worlds: Worlds, sleeper: int) -> None:
    """Its peers see how late it is, it does not: no more than it sees counts, or than a slower group does."""
    (points, seen), *others = worlds.of(4).run(skewed, sleeper=sleeper)
    assert all(other == points for other, _ in others)
    sizes = {kind: [size for what, size, _ in points if what.startswith(kind)] for kind in ("all_gather", "reduce", "all_r")}
    assert sizes["all_gather"] == sizes["reduce"] == [1 << 12, 1 << 14, 1 << 16, 1 << 18]
    assert sizes["all_r"] == [1 << 12, 1 << 14, 1 << 16, 1 << 17]
    for what, _, found in points:
        group, own = seen[what][sleeper]
        (peer,) = [seconds for rank, (of, seconds) in enumerate(seen[what]) if of == group and rank != sleeper]
        other = [min(pair) for pair in zip(*(seconds for of, seconds in seen[what] if of != group), strict=True)]
        assert found <= max(statistics.median(own), statistics.median(other))
        assert statistics.median(peer) > statistics.median(own)


def on_a_device(here: Rank) -> dict[tuple[Axis, Kind], set[float]]:
    found = sweeping(here, arrive=lambda: None, make_lanes=streams)
    assert found.crowded is not None
    return {key: {round(p.spread.median_s, 9) for p in points} for key, points in found.points.items()}


def test_on_a_device_its_events_tell_the_time(worlds: Worlds) -> None:
    for found in worlds.of(4).run(on_a_device):
        assert len(found) == 3
        # Of 3 to 20 in a row: each has an event where compute issues it, one where it begins and one where it ends.
        for seconds in found.values():
            assert all(1e-3 <= one <= 3e-3 for one in seconds)


def stalled(here: Rank) -> tuple[str, str, float]:
    begun_s = time.monotonic()
    with pytest.raises(ExecutionError) as raised:
        sweeping(here, arrive=partial(nap, here.rank, 3, 12.0), timeout_s=3.0)
    return type(raised.value).__name__, str(raised.value), time.monotonic() - begun_s


def test_a_collective_that_stalls_is_named_and_nobody_hangs(worlds: Worlds) -> None:
    with worlds.thrown_away(4) as world:
        found = world.run(stalled)
    name, text, _ = found[2]
    assert name == CollectiveTimeoutError.__name__
    assert "all_gather over the shard axis of 4096 bytes on shard group of ranks 2, 3 did not end within" in text
    for _, text, _ in (found[0], found[1]):
        assert "all_gather over the shard axis of 4096 bytes" in text
        assert "rank" in text
