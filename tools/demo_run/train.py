"""The first part, real compute: train the byte-level transformer, every model in lock step with stock FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from demo_run.data import Batches, library_folder, read_corpus
from demo_run.lockstep import backward, compare, in_turn, keep_runs, prepare
from demo_run.model import build
from demo_run.settings import Settings


def train(
    settings: Settings,
    mesh: DeviceMesh,
    attachments: ExitStack,
    tell: Callable[[dict[str, Any]], None],
    folder: Path,
) -> list[dict[str, Any]]:
    """Train all models for `settings.steps`; what this rank saw of each, stock first. `tell` hears of each step.

    Runs go into `folder`.
    """
    batches = Batches(read_corpus(library_folder(), settings.corpus_bytes), settings.context, settings.batch, settings.seed)
    runs = prepare(settings, lambda: build(settings, mesh), attachments)
    for run in runs:
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=settings.learning_rate)
    kept_steps = {0, settings.steps // 2, settings.steps - 1}
    for step in range(settings.steps):
        inputs, targets = batches.get(step, dist.get_rank())
        for run in in_turn(runs, step):
            loss = run.model(inputs, targets)
            backward(run, loss)
            run.losses.append(loss.item())
        compare(runs, keep=step in kept_steps)
        for run in runs:
            assert run.optimizer is not None
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), settings.clip_norm)
            run.optimizer.step()
            run.optimizer.zero_grad()
        tell({"part": "train", "step": step + 1, "of": settings.steps, "loss": runs[0].losses[-1]})
    keep_runs(runs, mesh, folder, settings.warmup_steps)
    return [run.record(settings.warmup_steps) for run in runs]
