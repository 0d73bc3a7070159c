"""One of the processes that train: `python -m demo_run.worker SETTINGS.json RANK STORE RESULT.json`.

Rank 0 writes one JSON object a line to standard output as it goes, and what all ranks saw to the result file. Beside it each
leaves a backward of each schedule, of the last part that was run.
"""

from __future__ import annotations

import datetime
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from demo_run.emulate import emulate
from demo_run.launch import leave_with_parent
from demo_run.settings import Settings
from demo_run.train import train


def _gather(local: Any, rank: int, world_size: int) -> list[Any]:
    gathered: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(local, gathered)
    return gathered or []


def main(settings_path: str, rank_text: str, store_path: str, result_path: str) -> None:
    """Join the others through the file `store_path`, run both parts, and leave."""
    settings, rank, folder = Settings.load(Path(settings_path)), int(rank_text), Path(result_path).parent
    leave_with_parent()
    torch.set_num_threads(1)

    def tell(event: dict[str, Any]) -> None:
        if rank == 0:
            print(json.dumps(event), flush=True)

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=settings.world_size,
        timeout=datetime.timedelta(seconds=settings.timeout_s),
    )
    shape = (settings.num_replicas, settings.num_shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    result: dict[str, Any] = {}
    with ExitStack() as attachments:
        result["train"] = _gather(train(settings, mesh, attachments, tell, folder), rank, settings.world_size)
        if settings.emulated_steps:
            result["sleep_s"], records = emulate(settings, mesh, attachments, tell, folder)
            result["emulated"] = _gather(records, rank, settings.world_size)
        dist.barrier()
    if rank == 0:
        Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
