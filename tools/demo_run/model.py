"""A byte-level transformer, and how it is sharded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from demo_run.settings import Settings

NUM_BYTES = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.feed_norm = nn.RMSNorm(dim)
        self.feed_in = nn.Linear(dim, 4 * dim, bias=False)
        self.feed_out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, dim) -> the same shape."""
        batch, context, dim = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, context, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, context, dim))
        y: torch.Tensor = x + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x))))
        return y


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, dim: int, num_blocks: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, dim)
        self.position = nn.Parameter(torch.randn(context, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, NUM_BYTES, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats a byte; inputs and targets are int64 of shape (batch, context)."""
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(settings: Settings, mesh: DeviceMesh) -> ByteTransformer:
    """The model of `settings.seed`, one FSDP2 unit a block and one for the rest: the same on every rank and every call."""
    torch.manual_seed(settings.seed)
    model = ByteTransformer(settings.dim, settings.num_blocks, settings.num_heads, settings.context)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
