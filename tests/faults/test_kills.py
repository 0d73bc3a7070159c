"""Ranks that are killed or stopped in mid-step: the others end with an error that names op, module, group and ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commplan
from commplan.errors import ExecutionError
from commplan.execute.control import Control
from commplan.execute.lanes import Task
from commplan.execute.workers import Completion, WorkerLanes
from commplan.fsdp2 import Options
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

TIMEOUT_S = 8.0

# The errors come within the timeout and a second; this machine may be busy with other things.
GENEROUS_S = 60.0

VICTIM = 1
OTHERS = (0, 2, 3)


def end_this_process(how: str) -> None:
    """Kill it; or stop it, as a process that hangs."""
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


class Deadly(WorkerLanes):
    """Ends its process when `op` begins, or when the collective is under way."""

    op = ""
    how = "kill"
    is_in_flight = False

    def submit(self, lane: str, task: Task, waits: Any) -> Completion:
        if task.op != self.op:
            return super().submit(lane, task, waits)

        def start() -> Any:
            work = task.start() if self.is_in_flight else None
            end_this_process(self.how)
            return work

        return super().submit(lane, replace(task, start=start), waits)


class Dying(torch.autograd.Function):
    """Ends its process in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        end_this_process(ctx.how)
        return grad, None


def loses_a_rank(here: Rank, where: str, how: str, schedule: str, reshard: bool) -> tuple[str, float]:
    """Train two steps; in the second the victim ends at `where`. The error of this rank, and how long it took."""
    model = models.shard(models.fk(4), here.mesh((2, 2)), reshard=reshard)
    lanes: Any = Deadly if here.rank == VICTIM else WorkerLanes
    # Attaching has the same timeout: ranks begin together.
    dist.barrier()
    options = Options(timeout_s=TIMEOUT_S, make_lanes=lambda device, timeout_s: lanes(timeout_s))
    commplan.attach(model, schedule, options=options)
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    model.zero_grad()
    block = model[2]  # type: ignore[index]
    original = block.forward
    if here.rank == VICTIM:
        # It ends before it is compared: else ranks outside the group of its last op find out in the next step only.
        Control._exchange = lambda self, check: time.sleep(10 * GENEROUS_S)  # type: ignore[method-assign]
        if where == "forward":
            block.forward = lambda x: end_this_process(how)
        elif where == "backward":
            block.forward = lambda x: original(Dying.apply(x, how))
        else:
            Deadly.how = how
            Deadly.op, _, flight = where.partition(" ")
            Deadly.is_in_flight = bool(flight)
    begin_s = time.monotonic()
    with pytest.raises(ExecutionError) as caught:
        model(torch.zeros(1, requires_grad=True)).sum().backward()
    elapsed_s = time.monotonic() - begin_s
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ExecutionError, match="earlier backward failed"):
        model(torch.zeros(1))
    with pytest.raises(ExecutionError, match="earlier backward failed"):
        torch.optim.SGD(model.parameters()).step()
    # The others must not take the end of this process for the cause.
    time.sleep(TIMEOUT_S / 2)
    return str(caught.value), elapsed_s


OP = r"(RS|AR)_\d of module '\d' on the group of ranks \[\d, \d\]"
GATHER = r"AG of module '(\d|\(root\))' on the group of ranks \[\d, \d\]"
CHECK = r"rank check \d \(backward\) on the control group of ranks 0, 1, 2, 3"


def assert_named(found: dict[int, tuple[str, float]], how: str) -> None:
    assert tuple(found) == OTHERS
    for message, elapsed_s in found.values():
        assert re.match(rf"(({OP}|{GATHER})( and )?)+|{CHECK}", message), message
        assert "Ranks: " in message, message
        assert elapsed_s < GENEROUS_S
        if how == "stop":
            assert "did not end within" in message or "gave up" in message, message
    if how == "stop":
        # Whoever timed out last knows that the victim says nothing, or says where it was last.
        assert any(re.search(r"\b1 (silent|in backward 2|after backward 1)", message) for message, _ in found.values()), found


PLACES = ["RS_1", "AR_1 in flight", "AR_3", "backward", "forward"]
PIPELINED = "pipelined_allreduce"

KILLED = [*((where, PIPELINED, True) for where in PLACES), ("RS_1", "blocking", True), ("AR_3", "single_lane", True)]
# Where parameters are resharded, the others may be in an all-gather of FSDP2's on the thread of backward.
HANGS = [*((where, PIPELINED, True) for where in PLACES), ("RS_1", PIPELINED, False), ("backward", PIPELINED, False)]

LOST = [*(("kill", *case) for case in KILLED), *(("stop", *case) for case in HANGS)]

AT_ONCE = 3
"""Worlds that run beside each other: most of their time ranks wait for one that is gone."""

Case = tuple[str, str, str, bool]
Outcome = dict[int, tuple[str, float]] | Exception


@pytest.fixture(scope="module")
def lost(worlds: Worlds) -> dict[Case, Outcome]:
    """What became of the others in each case."""

    def lose(case: Case) -> Outcome:
        how, where, schedule, reshard = case
        try:
            with worlds.thrown_away(4) as world:
                return world.run_with_victims(loses_a_rank, [VICTIM], where=where, how=how, schedule=schedule, reshard=reshard)
        except Exception as error:  # noqa: BLE001 - it belongs to the test of this case
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(LOST, pool.map(lose, LOST), strict=True))


@pytest.mark.parametrize("case", LOST, ids=lambda case: "-".join(map(str, case)))
def test_a_rank_is_lost(lost: dict[Case, Outcome], case: Case) -> None:
    found = lost[case]
    if isinstance(found, Exception):
        raise found
    assert_named(found, case[0])
