"""Several live models of equal weights, stepped in turn: each gets the same batch before any gets the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import commplan
from commplan.sight.report import BackwardReport
from commplan.sight.runs import Run as SavedRun
from demo_run.measure import Digest, Sample, StockProbe, attached_sample, largest_difference
from demo_run.page import run_path
from demo_run.settings import ALONE, STOCK, Settings


@dataclass
class Run:
    """One model, what drives its communication, and what was seen of it. `attachment` is None for the stock model."""

    name: str
    model: nn.Module
    attachment: Any = None
    optimizer: torch.optim.Optimizer | None = None
    losses: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    reports: list[BackwardReport] = field(default_factory=list)
    max_grad_diff: float = 0.0
    gradients: Digest = field(default_factory=Digest)

    def record(self, warmup_steps: int) -> dict[str, Any]:
        """What this rank saw, as plain data; times are medians over the steps after `warmup_steps`."""
        seen = self.samples[warmup_steps:] or self.samples
        parameters = Digest()
        parameters.add(self.model.parameters())
        return {
            "schedule": self.name,
            "losses": self.losses,
            "max_grad_diff": self.max_grad_diff,
            "gradients": self.gradients.hex(),
            "parameters": parameters.hex(),
            "backward_s": median(s.backward_s for s in seen),
            "hidden_s": median(s.hidden_s for s in seen),
            "exposed_s": median(s.exposed_s for s in seen),
            "lanes": {
                lane: [median(s.lanes[lane][side] for s in seen if lane in s.lanes) for side in (0, 1)]
                for lane in seen[-1].lanes
            },
            "peak_bytes": max(s.peak_bytes for s in self.samples),
            "declared_peak_bytes": self.samples[-1].declared_peak_bytes,
        }


def prepare(settings: Settings, build: Callable[[], nn.Module], attachments: ExitStack) -> list[Run]:
    """A stock model, then one for each schedule, attached until `attachments` closes."""
    runs = [Run(STOCK, build())]
    for name in settings.schedules:
        model = build()
        runs.append(Run(name, model, attachments.enter_context(commplan.attach(model, name))))
    return runs


def backward(run: Run, loss: torch.Tensor) -> None:
    """Run backward and keep a sample of it."""
    if run.attachment is not None:
        loss.backward()
        run.reports.append(run.attachment.last_backward)
        run.samples.append(attached_sample(run.reports[-1]))
        return
    begin_s = time.perf_counter()
    if run.name == ALONE:
        loss.backward()
        run.samples.append(Sample(time.perf_counter() - begin_s, 0.0, 0.0, {}, 0, None))
        return
    with StockProbe() as probe:
        loss.backward()
        run.samples.append(probe.sample(time.perf_counter() - begin_s))


def in_turn(runs: list[Run], step: int) -> Iterator[Run]:
    """The runs, another one first in each step; ranks start each together, so that none is measured waiting for a peer."""
    first = step % len(runs)
    for run in runs[first:] + runs[:first]:
        dist.barrier()
        yield run


def compare(runs: list[Run], keep: bool) -> None:
    """Compare the gradients of this step with those of stock, the first run; `keep`: take them into the digests."""
    expected = [parameter.grad for parameter in runs[0].model.parameters()]
    for run in runs:
        gradients = [parameter.grad for parameter in run.model.parameters()]
        run.max_grad_diff = max(run.max_grad_diff, largest_difference(gradients, expected))
        if keep:
            run.gradients.add(gradients)


def keep_runs(runs: Sequence[Run], mesh: DeviceMesh, folder: Path, warmup_steps: int) -> None:
    """Each rank leaves one backward of each schedule in `folder`: the median, by the slowest rank of each step."""
    coordinates = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    for run in runs:
        if not run.reports:
            continue
        seen = run.reports[warmup_steps:] or run.reports
        slowest_s = torch.tensor([report.duration_s for report in seen], dtype=torch.float64)
        dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
        chosen = seen[int(slowest_s.argsort()[len(seen) // 2])]
        saved = SavedRun(dist.get_rank(), coordinates, time.time() - time.perf_counter(), chosen)
        run_path(folder, run.name, saved.rank).write_text(saved.to_json(), encoding="utf-8")
