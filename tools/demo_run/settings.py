"""What a demonstration runs: one frozen record, handed to the workers as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

STOCK = "fsdp2 (stock)"
ALONE = "compute alone"

SCHEDULES = (
    "blocking",
    "pipelined_allreduce",
    "bucketed_pipeline_depth2",
    "overlapped_allreduce",
    "delayed_allreduce",
    "windowed_allreduce",
)


@dataclass(frozen=True)
class Settings:
    """Sizes of both parts.

    Attributes:
        schedules: library names; stock FSDP2 always runs beside them.
        num_replicas, num_shards: the mesh ("replicate", "shard"); one process each.
        steps: optimizer steps of the training part, of every model.
        warmup_steps: first steps that are left out of the medians, in both parts.
        emulated_steps: backwards of the part with emulated compute, of every model; 0 leaves that part out.
        corpus_bytes: how much text is read, at most.
        timeout_s: how long a collective may take before a worker gives up.
    """

    schedules: tuple[str, ...] = SCHEDULES
    num_replicas: int = 2
    num_shards: int = 2
    seed: int = 1
    steps: int = 40
    warmup_steps: int = 3
    emulated_steps: int = 10
    num_blocks: int = 6
    dim: int = 128
    num_heads: int = 4
    context: int = 128
    batch: int = 4
    learning_rate: float = 3e-3
    clip_norm: float = 1.0
    corpus_bytes: int = 4 << 20
    emulated_blocks: int = 8
    emulated_dim: int = 1024
    timeout_s: float = 60.0

    @property
    def world_size(self) -> int:
        """Number of worker processes."""
        return self.num_replicas * self.num_shards

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "schedules": tuple(fields["schedules"])})
