"""The models of the shared cases, and small relatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Scaled(nn.Module):
    """Block k of FK: returns x + k * w.sum()."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.w = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.k * self.w.sum()


def fk(num_blocks: int) -> nn.Module:
    """FK(K): every gradient entry of block k's w is k times the mean over ranks of (rank + 1)."""
    return nn.Sequential(*(Scaled(k) for k in range(1, num_blocks + 1)))


class Tanh(nn.Module):
    """A block of FN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """FN: blocks b.0, b.1, b.2 and a head in the root. `path` is the order in which blocks run."""

    def __init__(self, path: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.b = nn.ModuleList(Tanh() for _ in range(3))
        self.head = nn.Linear(4, 2, bias=False)
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.path:
            x = self.b[i](x)
        return self.head(x)


class Mlps(nn.Module):
    """Residual blocks of these widths; a head of its own width, if any, is left to the root."""

    def __init__(self, widths: Sequence[int], head: int = 0) -> None:
        super().__init__()
        self.b = nn.ModuleList(nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in widths)
        self.head = nn.Linear(4, head) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = x + block(x)
        return self.head(x)


class Pair(nn.Module):
    """F2: two Linear in one group; a forward runs those named in `uses`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.uses = "ac"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.uses:
            x = getattr(self, name)(x)
        return x


def pair(mesh: DeviceMesh) -> Any:
    """F2, sharded; equal on all ranks."""
    torch.manual_seed(0)
    return fully_shard(Pair(), mesh=mesh)


class TinyTransformer(nn.Module):
    """Embedding, two pre-norm blocks, head; odd sizes, so that shards are padded on 2 and on 3 ranks."""

    def __init__(self, dim: int = 12, vocabulary: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.b = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 23, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.b:
            x = block(x)
        return self.head(self.norm(x))


def shard(
    model: nn.Module, mesh: DeviceMesh, *, bf16: bool = False, reshard: bool | int | None = None, **kwargs: object
) -> nn.Module:
    """Shard every block, then the root."""
    if bf16:
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if reshard is not None:
        kwargs["reshard_after_forward"] = reshard
    blocks = model if isinstance(model, nn.Sequential) else model.b
    for block in blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)
