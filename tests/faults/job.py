"""One process of a small training job, as a launcher starts it: `python -m tests.faults.job` with torchrun's environment.

Trains until step `LOSE_AT`, in which rank `VICTIM` is killed or stopped in mid-backward, or sleeps in place of the step; errors
are not caught. Where `HOW` is "leave" it sleeps in place of backward, and the others drop the model in mid-backward and end;
Python's own end then takes `LINGER_S`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
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


class Linger:
    """What makes Python take longer to end than the collectives that are under way then."""

    def __init__(self, linger_s: float) -> None:
        self.linger_s = linger_s

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(self.linger_s)


def wrong(x: torch.Tensor) -> torch.Tensor:
    """`x`, with a mistake of the user's in its backward."""

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("a mistake")

    x = x.clone()
    x.register_hook(fail)
    return x


def leave(model: Any, *, is_victim: bool) -> None:
    """A backward that fails while collectives wait for the victim."""
    # Before a hook waits for what the one before it has issued.
    forward = model[2].forward
    model[2].forward = lambda x: forward(wrong(x))
    loss = model(torch.zeros(1, requires_grad=True)).sum()
    if is_victim:
        time.sleep(float(os.environ["AWAY_S"]))
    with contextlib.suppress(KeyError):
        loss.backward()


def main() -> None:
    warnings.filterwarnings("ignore", module=r"torch\b")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    # Who leaves must have collectives under way, and wait for nothing: neither parameters nor, in a hook, a reduce-scatter.
    leaves = os.environ["HOW"] == "leave"
    schedule = "overlapped_allreduce" if leaves else "pipelined_allreduce"
    model: Any = models.shard(models.fk(4), mesh, reshard=not leaves)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    commplan.attach(model, schedule, options=commplan.Options(timeout_s=float(os.environ["TIMEOUT_S"])))
    block = model[1]
    original = block.forward
    for step in range(4):
        is_victim = step == int(os.environ["LOSE_AT"]) and rank == int(os.environ["VICTIM"])
        if is_victim and os.environ["HOW"] == "sleep":
            time.sleep(600)
        if leaves and step == int(os.environ["LOSE_AT"]):
            leave(model, is_victim=is_victim)
            del model, optimizer, block, original
            gc.collect()
            print("left")
            return
        if is_victim:
            block.forward = lambda x: original(Lost.apply(x))
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")


if __name__ == "__main__":
    main()
    # Modules go when Python has begun to end, and threads may not come back to it.
    sys.modules["linger"] = Linger(float(os.environ["LINGER_S"]))  # type: ignore[assignment]
