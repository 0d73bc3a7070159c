"""The second part, emulated compute: backward sleeps where an accelerator would compute, so that two cores can show overlap.

How long a block sleeps is measured first: one and a half times what stock FSDP2 needs for the collectives of one block
here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench_run.emulated import SleepingLinear
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from demo_run.lockstep import Run, backward, compare, in_turn, keep_runs, prepare
from demo_run.settings import ALONE, Settings

_CALIBRATION_STEPS = 8
_COMPUTE_TO_COLLECTIVES = 1.5
_SHORTEST_S, _LONGEST_S = 0.004, 0.15


def _build(settings: Settings) -> nn.Sequential:
    torch.manual_seed(settings.seed)
    return nn.Sequential(*(SleepingLinear(settings.emulated_dim) for _ in range(settings.emulated_blocks)))


def _shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    # Parameters stay gathered: only the gradients' communication is left in backward.
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


def _step(run: Run, x: torch.Tensor) -> None:
    backward(run, run.model(x).square().mean())


def _calibrate(stock: Run, x: torch.Tensor, num_blocks: int) -> float:
    for _ in range(_CALIBRATION_STEPS):
        dist.barrier()
        _step(stock, x)
        stock.model.zero_grad()
    spent_s = torch.tensor(median(sample.exposed_s for sample in stock.samples[_CALIBRATION_STEPS // 2 :]) / num_blocks)
    dist.all_reduce(spent_s, op=dist.ReduceOp.AVG)
    stock.samples.clear()
    return min(max(spent_s.item() * _COMPUTE_TO_COLLECTIVES, _SHORTEST_S), _LONGEST_S)


def emulate(
    settings: Settings,
    mesh: DeviceMesh,
    attachments: ExitStack,
    tell: Callable[[dict[str, Any]], None],
    folder: Path,
) -> tuple[float, list[dict[str, Any]]]:
    """How long a block sleeps, in seconds, and what this rank saw of each run: stock, schedules, compute alone.

    Runs go into `folder`.
    """
    runs = prepare(settings, lambda: _shard(_build(settings), mesh), attachments)
    alone = Run(ALONE, _build(settings))
    x = torch.randn(1, settings.emulated_dim, generator=torch.Generator().manual_seed(dist.get_rank()))
    x.requires_grad_()
    sleep_s = _calibrate(runs[0], x, settings.emulated_blocks)
    for run in (*runs, alone):
        for block in run.model.children():
            assert isinstance(block, SleepingLinear)
            block.seconds = sleep_s
    for step in range(settings.emulated_steps):
        for run in in_turn([*runs, alone], step):
            _step(run, x)
        compare(runs, keep=step == 0)
        for run in (*runs, alone):
            run.model.zero_grad()
        tell({"part": "emulate", "step": step + 1, "of": settings.emulated_steps})
    keep_runs(runs, mesh, folder, settings.warmup_steps)
    return sleep_s, [run.record(settings.warmup_steps) for run in (*runs, alone)]
