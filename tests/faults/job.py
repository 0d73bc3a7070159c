"""One process of a small training job, as a launcher starts it: `python -m tests.faults.job` with torchrun's environment.

Trains until step `LOSE_AT`, in which rank `VICTIM` is killed or stopped in mid-backward; errors are not caught.
"""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commplan
from tests.worlds import models


class Lost(torch.autograd.Function):
    """Ends its process in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL if os.environ["HOW"] == "kill" else signal.SIGSTOP)
        return grad


def main() -> None:
    warnings.filterwarnings("ignore", module=r"torch\b")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model: Any = models.shard(models.fk(4), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    commplan.attach(model, "pipelined_allreduce", options=commplan.Options(timeout_s=float(os.environ["TIMEOUT_S"])))
    block = model[1]
    original = block.forward
    for step in range(4):
        if step == int(os.environ["LOSE_AT"]) and rank == int(os.environ["VICTIM"]):
            block.forward = lambda x: original(Lost.apply(x))
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")


if __name__ == "__main__":
    main()
