"""No safeguard of the stream path can be left out unnoticed. `pytest -s` prints what noticed each."""

from __future__ import annotations

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import commplan
from commplan.execute.trace_log import Did, TraceLog
from commplan.fsdp2 import attachment as attach_module
from tests.devices import mutants
from tests.devices.fake import Pace
from tests.devices.recording import Device
from tests.devices.test_order import APPLY_ON_A_LANE_OF_ITS_OWN
from tests.worlds import models, parity
from tests.worlds.world import Rank

ALL_REDUCES = (False, True, True)
"""Three backwards: a partial sum is left, added, and gradients are accumulated; events of the first are used again."""


def join_nobody() -> None:
    """Be one rank of two, the other of which does not exist: collectives end at once, and only their order matters."""
    import torch.testing._internal.distributed.fake_pg

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\b")
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)


def left_out(schedule: str) -> dict[str, mutants.Tally]:
    """What became of every mutant under a schedule."""
    here = Rank(0, 2)
    device = Device(Pace.EAGER, traced=mutants.Leaky)
    assert isinstance(device.module, mutants.Leaky)
    device.module.restart(None)
    model: Any = models.shard(models.fk(3), here.mesh((1, 2)), bf16=True)
    with (
        patch.object(attach_module, "agree", lambda *_: "alone"),
        patch.object(attach_module, "confirm"),
        commplan.attach(model, schedule, options=device.options) as attachment,
    ):

        def train() -> bool:
            timed = []
            for all_reduce in ALL_REDUCES:
                parity.set_flags(model, {"all_reduce": all_reduce})
                model(torch.zeros(1, requires_grad=True)).sum().backward()
                report: Any = attachment.last_backward
                timed.append(mutants.is_timed(report.ops.timeline))
            device.read(model)
            model.zero_grad()
            return all(timed)

        for _ in range(2):
            train()
        return mutants.run(device.module, train)


def test_none_survives() -> None:
    schedules = [*(name for name, _ in parity.LIBRARY), APPLY_ON_A_LANE_OF_ITS_OWN]
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context, initializer=join_nobody) as pool:
        tallies = list(pool.map(left_out, schedules))
    found = dict(zip([*schedules[:-1], "apply on a lane"], tallies, strict=True))
    print("\n" + mutants.table(found))
    for schedule, of_kinds in found.items():
        for kind, tally in of_kinds.items():
            assert not tally.survived, (schedule, kind, tally.survived)
        assert of_kinds["wait"].checker > 20
        assert of_kinds["record"].checker > 20
        assert of_kinds["wait for a collective"].checker > 6
        # `blocking` waits for each reduce-scatter right behind it, before compute can use the memory for anything else.
        inputs = of_kinds["reference to inputs"]
        assert (inputs.unused if schedule == "blocking" else inputs.checker) > 6
    assert found["apply on a lane"]["reference to a shard"].checker > 0


def test_a_search_tells_what_is_implied() -> None:
    """Of two waits for one event, with work between them, the second is."""
    log = TraceLog()
    log.join("lane", "compute")
    first = len(log.entries) - 1
    log.add(Did.KERNEL, "lane", name="work")
    log.add(Did.WAIT, "lane", event=log.entries[0].event)
    assert mutants.is_implied(log.entries, first + 2)
    assert not mutants.is_implied(log.entries, first)
    assert mutants.is_waited_for(log.entries, 0)
