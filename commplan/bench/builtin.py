"""A model to try schedules on where there is no script: a transformer over random tokens, trained until stopped."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

VOCABULARY: Final = 256
HEAD_WIDTH: Final = 64


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model is, and a step.

    Attributes:
        num_modules: blocks of 12 x width^2 parameters; the root holds embedding and head besides.
        width: a multiple of 64, or less than 64.
        batch, context: each rank's step is `batch` rows of `context` tokens.
        num_replicas: the replicate axis of the mesh; None: see `default_replicas`.
    """

    num_modules: int
    width: int
    batch: int
    context: int
    num_replicas: int | None = None


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = max(1, width // HEAD_WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) -> the same."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(_Block(size.width) for _ in range(size.num_modules))
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 of shape (batch, context + 1) -> mean cross entropy of predicting each next one."""
        x = self.embedding(window[:, :-1])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), window[:, 1:].flatten())


def default_replicas(world_size: int, ranks_of_host: int) -> int:
    """The replicate axis: one replica for each host; two on a single host with an even number of ranks, from four on."""
    if 0 < ranks_of_host < world_size and world_size % ranks_of_host == 0:
        return world_size // ranks_of_host
    return 2 if world_size >= 4 and world_size % 2 == 0 else 1


def train(size: Size) -> None:
    """Train until somebody raises. Parameters in fp32; on an accelerator compute is in bf16, reduction in fp32."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group()
    world_size = dist.get_world_size()
    replicas = size.num_replicas or default_replicas(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    mesh = init_device_mesh(device.type, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)  # the same weights on every rank
    model: Any = Transformer(size).to(device)
    dtypes = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type != "cpu" else MixedPrecisionPolicy()
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=dtypes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # other tokens on every rank
    while True:
        model(torch.randint(VOCABULARY, (size.batch, size.context + 1), device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
