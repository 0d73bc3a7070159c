"""Reports of real backwards: four processes, collectives that take a while, and one rank that is late on purpose."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import commplan
from commplan.fsdp2 import Options
from commplan.sight.figures import Report
from tests.worlds import models
from tests.worlds.test_overlap import Paced, SlowBlock
from tests.worlds.world import Rank, Worlds

LATE_S = 0.6
LATE_RANK = 3
NUM_BLOCKS = 4


class Delay(torch.autograd.Function):
    """Holds up backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class LateBlock(SlowBlock):
    late_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Delay.apply(super().forward(x), self.late_s)


def paced(device: torch.device, timeout_s: float) -> Paced:
    return Paced(timeout_s)


def attached(here: Rank, schedule: str, **options: Any) -> tuple[torch.nn.Module, commplan.Attachment]:
    model = models.shard(torch.nn.Sequential(*(LateBlock(k) for k in range(1, NUM_BLOCKS + 1))), here.mesh((2, 2)))
    return model, commplan.attach(model, schedule, options=Options(timeout_s=60, make_lanes=paced, **options))


def step(model: torch.nn.Module) -> None:
    model(torch.zeros(1, requires_grad=True)).sum().backward()


def reported(here: Rank, schedule: str, late_s: float) -> tuple[dict[str, Any], str, dict[str, float], dict[str, Any]]:
    model, attachment = attached(here, schedule)
    with attachment:
        assert attachment.stats() == {}
        model[2].late_s = late_s if here.rank == LATE_RANK else 0.0
        step(model)
        report = attachment.report()
        # As JSON, and back.
        return (
            json.loads(json.dumps(report.to_dict())),
            str(report),
            attachment.stats(),
            attachment.report(local=True).to_dict(),
        )


def test_lanes_add_up_and_stats_say_the_same(worlds: Worlds) -> None:
    for report, _, stats, local in worlds.of(4).run(reported, schedule="pipelined_allreduce", late_s=0.0):
        for lane in report["lanes"]:
            assert lane["hidden_s"] + lane["exposed_s"] + lane["idle_s"] == pytest.approx(report["backward_s"])
            assert 0 <= lane["peers_s"] <= lane["hidden_s"] + lane["exposed_s"] + 1e-9
            scope = "commplan" if lane["lane"] == "all" else f"commplan/{lane['lane']}"
            assert {key: stats[f"{scope}/{key}"] for key in ("hidden_s", "exposed_s", "idle_s")}.items() <= lane.items()
        assert stats["commplan/peak_bytes"] <= stats["commplan/declared_peak_bytes"] == report["declared_peak_bytes"]
        assert all(isinstance(value, float | int) for value in stats.values())
        assert report["num_hosts"] == 1
        assert report["clock_error_s"] == 0
        assert local["clock_error_s"] is None
        assert all(lane["peers_s"] is None for lane in local["lanes"])
        assert [op["op"] for op in local["ops"]] == [op["op"] for op in report["ops"]]


def test_reasons_of_a_schedule_that_blocks(worlds: Worlds) -> None:
    """Compute waits for each collective where it is issued, and the file says so at a line."""
    for report, text, _, _ in worlds.of(4).run(reported, schedule="blocking", late_s=0.0):
        assert {op["op"] for op in report["ops"]} == {f"{kind}_{n}" for kind in ("RS", "AR") for n in range(NUM_BLOCKS)}
        for op in report["ops"]:
            n = int(op["op"].split("_")[1])
            assert op["module"] == str(NUM_BLOCKS - 1 - n)
            assert any(f"compute waited for it in post_backward of {op['module']} (" in reason for reason in op["reasons"])
            assert any("blocking.yaml:" in reason for reason in op["reasons"])
            assert op["op"] in text


def test_what_is_left_at_the_end_is_the_tail(worlds: Worlds) -> None:
    for report, text, _, _ in worlds.of(4).run(reported, schedule="fsdp2_native", late_s=0.0):
        last = next(op for op in report["ops"] if op["op"] == f"AR_{NUM_BLOCKS - 1}")
        assert "tail: nothing left to hide behind" in last["reasons"]
        assert "tail: nothing left to hide behind" in text


def test_a_late_rank_is_named_with_about_the_time(worlds: Worlds) -> None:
    reports = [answer[0] for answer in worlds.of(4).run(reported, schedule="pipelined_allreduce", late_s=LATE_S)]
    # Ranks 2 and 3 share a shard group, ranks 1 and 3 a replicate group.
    for rank, kind in ((2, "RS"), (1, "AR")):
        longest = max(reports[rank]["ops"], key=lambda op: op["peers_s"])
        assert longest["op"].startswith(kind)
        assert longest["last_rank"] == LATE_RANK
        assert LATE_S / 3 < longest["peers_s"] < LATE_S * 2
    waited = [next(lane["peers_s"] for lane in report["lanes"] if lane["lane"] == "all") for report in reports]
    assert all(waited[rank] > LATE_S / 3 for rank in (0, 1, 2))
    assert waited[LATE_RANK] < LATE_S / 3


def waits_for_fsdp2(here: Rank, schedule: str) -> list[str]:
    """What compute of a backward waits for outside of the plan, where the last rank is late."""
    model, attachment = attached(here, schedule)
    with attachment:
        for _ in range(2):
            model[2].late_s = LATE_S / 2 if here.rank == LATE_RANK else 0.0
            # The last rank of a forward comes late, too.
            time.sleep(model[2].late_s)
            step(model)
        report = attachment.last_backward
        assert report is not None
        assert all(report.begin_s <= wait.begin_s <= wait.end_s <= report.end_s for wait in report.compute_waits)
        assert [wait.begin_s for wait in report.compute_waits] == sorted(wait.begin_s for wait in report.compute_waits)
        waits = [wait for wait in report.compute_waits if not wait.op.isdecimal() and wait.op]
        assert all(wait.end_s > wait.begin_s for wait in waits)
        return [wait.op for wait in waits]


def test_compute_stands_still_while_the_host_waits_for_fsdp2s_own_all_gathers(worlds: Worlds) -> None:
    for rank, waits in enumerate(worlds.of(4).run(waits_for_fsdp2, schedule="overlapped_allreduce")):
        assert len(waits) <= NUM_BLOCKS
        if rank == LATE_RANK - 1:
            # The late one shares its shards; module 0 is gathered while module 1 has its backward.
            assert "FSDP2's all-gather of module '0'" in waits


def test_a_plan_that_gathers_leaves_nothing_to_wait_for_outside_of_it(worlds: Worlds) -> None:
    for waits in worlds.of(4).run(waits_for_fsdp2, schedule="prefetch_overlap"):
        assert waits == []


class Checkpointed(torch.nn.Sequential):
    """Each block runs its forward again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def waits_before_its_first_hook(here: Rank) -> tuple[str, float, float]:
    """What a backward waits for first, when, and when it began; the root has no parameters, and the last rank is late."""
    model = models.shard(Checkpointed(*models.fk(3)), here.mesh((2, 2)))
    with commplan.attach(model, "overlapped_allreduce") as attachment:
        loss = model(torch.zeros(1, requires_grad=True)).sum()
        if here.rank == LATE_RANK:
            time.sleep(LATE_S / 2)
        loss.backward()
        report = attachment.last_backward
        assert report is not None
        first = min(report.compute_waits, key=lambda wait: wait.begin_s)
        return first.op, first.begin_s, report.begin_s


def test_a_backward_begins_with_the_first_wait_of_a_forward_that_is_run_again(worlds: Worlds) -> None:
    op, waited_s, begun_s = worlds.of(4).run(waits_before_its_first_hook)[LATE_RANK - 1]
    assert op == "FSDP2's all-gather of module '2'"
    assert begun_s == waited_s


def alone(here: Rank) -> str:
    model, attachment = attached(here, "pipelined_allreduce")
    with attachment:
        step(model)
        if here.rank != 2:
            with pytest.raises(commplan.ExecutionError) as caught:
                attachment.report(timeout_s=3)
            dist.barrier()
        else:
            dist.barrier()
            # It comes too late, is told so, and is in step again.
            with pytest.raises(commplan.ExecutionError) as caught:
                attachment.report(timeout_s=3)
        step(model)
        assert isinstance(attachment.report(), Report)
    return str(caught.value)


def test_ranks_that_do_not_call_report_are_named_and_training_goes_on(worlds: Worlds) -> None:
    said = worlds.of(4).run(alone)
    assert all("rank(s) 2 did not call report() within 3 s" in told for told in said)


def unequal(here: Rank) -> str:
    model, attachment = attached(here, "pipelined_allreduce")
    with attachment:
        with pytest.raises(commplan.ExecutionError, match="before the first backward"):
            attachment.report()
        with pytest.raises(commplan.ExecutionError, match="before the first backward"):
            attachment.report(local=True)
        step(model)
        return str(attachment.report(local=True))


def test_before_the_first_backward_there_is_nothing_to_report(worlds: Worlds) -> None:
    for text in worlds.of(4).run(unequal):
        assert "peers were not asked" in text
