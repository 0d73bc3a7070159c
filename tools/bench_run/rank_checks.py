"""What comparing ranks costs: the same backward without rank checks, with one a backward, and with one a reduction."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commplan
from bench_run.emulated import sleep_in_backward
from commplan.fsdp2.attachment import RankChecks

MESH: Final = (2, 2)
PARAMETERS: Final = 16
WIDTH: Final = 32
WARM_UPS: Final = 3
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Setting:
    """One comparison: `num_modules` of 16 parameters; the backward of each also sleeps `compute_ms`, as if an accelerator
    computed.
    """

    schedule: str
    num_modules: int
    compute_ms: float
    runs: int


class _Block(nn.Module):
    def __init__(self, compute_ms: float) -> None:
        super().__init__()
        self.compute_ms = compute_ms
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(PARAMETERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return sleep_in_backward(x, self.compute_ms / 1e3)


def _model(setting: Setting, mesh: Any) -> nn.Module:
    model = nn.Sequential(*(_Block(setting.compute_ms) for _ in range(setting.num_modules)))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _backward_s(model: nn.Module) -> float:
    """One step; seconds from the begin of backward until this rank has its gradients."""
    loss = model(torch.ones(1, WIDTH, requires_grad=True)).sum()
    dist.barrier()
    begin_s = time.perf_counter()
    loss.backward()
    taken_s = time.perf_counter() - begin_s
    model.zero_grad()
    return taken_s


def _worker(rank: int, settings: Sequence[Setting], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", MESH[0] * MESH[1])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MESH[0] * MESH[1], timeout=timedelta(seconds=TIMEOUT_S))
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard"))
    figures = []
    for setting in settings:
        modes: Sequence[RankChecks] = get_args(RankChecks)
        models = {mode: _model(setting, mesh) for mode in modes}
        options = commplan.Options(timeout_s=TIMEOUT_S)
        attached = [commplan.attach(m, setting.schedule, options=options, rank_checks=mode) for mode, m in models.items()]
        times_s: dict[str, list[float]] = {mode: [] for mode in modes}
        for turn in range(-WARM_UPS, setting.runs):
            for mode, model in models.items():
                taken_s = _backward_s(model)
                if turn >= 0:
                    times_s[mode].append(taken_s)
        for attachment in attached:
            attachment.detach()
        medians_s = {mode: statistics.median(found) for mode, found in times_s.items()}
        ratios = {mode: median_s / medians_s["off"] for mode, median_s in medians_s.items()}
        figures.append({**asdict(setting), "backward_s": medians_s, "ratio_off": ratios})
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Medians of rank 0 in seconds, and their ratio to no rank checks, for each setting; modes take turns in one run."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, args=(tuple(settings), folder), nprocs=MESH[0] * MESH[1])
        found: list[dict[str, Any]] = json.loads(Path(folder, "figures.json").read_text())
    return found


def shown(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The figures for people."""
    lines = [f"{'modules':>7} {'compute, ms':>12}" + "".join(f"{mode:>18}" for mode in get_args(RankChecks))]
    for row in figures:
        times = [f"{row['backward_s'][mode] * 1e3:9.1f} ms {ratio:5.2f}" for mode, ratio in row["ratio_off"].items()]
        lines.append(f"{row['num_modules']:>7} {row['compute_ms']:>12g}" + "".join(f"{text:>18}" for text in times))
    return [*lines, "median backward of rank 0, and its ratio to that without rank checks; 4 processes, gloo, modes in turn"]
