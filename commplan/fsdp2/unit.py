"""FSDP2's parameter groups as the executor's units: its packing, reduce ops, factors, casts and accumulation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commplan.execute.interface import Layout, Reduction
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.groups import Group


class FsdpUnit:
    """One parameter group. See `commplan.execute.interface.Unit`.

    Args:
        group: what is driven.
        reduce_scatter_group: the process group for its reduce-scatter, over the ranks of its shard group; None without one.
    """

    def __init__(self, group: Group, reduce_scatter_group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._mesh = private.mesh_facts(group.raw)
        self._reduce_scatter_group = reduce_scatter_group
        facts = next((f for f in private.param_facts(group.raw) if f.requires_grad), private.param_facts(group.raw)[0])
        self._orig_dtype = facts.orig_dtype
        self.reduce_dtype = facts.reduce_dtype

    @property
    def name(self) -> str:
        """The name of the sharded module."""
        return self._group.name

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        return self._group.raw.device

    @property
    def keeps_partial_sum(self) -> bool:
        """FSDP2's flags, as they stand now."""
        raw = self._group.raw
        return not (raw.reduce_grads and raw.all_reduce_grads)

    def take_gradients(self) -> FsdpGradients | None:
        """Do FSDP2's own bookkeeping after a backward of the group; what it left to reduce, if anything."""
        taken = private.take_gradients(self._group.raw)
        return FsdpGradients(self, taken) if taken else None

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """How FSDP2 would reduce this group in `dtype`."""
        factors = private.factors(self._group.raw, self._mesh, dtype)
        return Reduction(
            dtype,
            self._reduce_scatter_group,
            self._mesh.replicate,
            factors.shard_op,
            factors.replicate_op,
            factors.predivide,
            factors.postdivide,
            factors.local_divide,
        )

    def partial_reduction(self) -> Reduction:
        """See `Unit`."""
        return self.reduction(self.reduce_dtype)

    def reduce_scatter(self, out: torch.Tensor, source: torch.Tensor, reduction: Reduction) -> dist.Work | None:
        """See `Unit`."""
        assert reduction.shard_group is not None
        return private.reduce_scatter(self._group.raw, out, source, reduction.shard_group, reduction.shard_op)

    def apply(self, shard: torch.Tensor, layout: Layout) -> bool:
        """See `Unit`. Casts to the parameters' dtype, then accumulates into `.grad`."""
        with torch.no_grad():
            gradient = shard.to(self._orig_dtype)
            is_view = False
            offset = 0
            for position, numel in zip(layout.params, layout.numels, strict=True):
                is_view |= private.write_grad(self._group.raw, position, gradient[offset : offset + numel])
                offset += numel
        return is_view and gradient is shard


class FsdpGradients:
    """Gradients of one group. See `commplan.execute.interface.Gradients`."""

    def __init__(self, unit: FsdpUnit, taken: dict[int, torch.Tensor]) -> None:
        self._raw = unit._group.raw
        self._taken = taken
        self.reduction = unit.reduction(unit.reduce_dtype)
        shard_size = self.reduction.shard_size
        self.layout = Layout(tuple(taken), tuple(private.shard_numel(self._raw, p, shard_size) for p in taken))
        self.all_reduce = self.reduction.replicate_group is None or self._raw.all_reduce_grads
        self.size_bytes = sum(g.nbytes for g in taken.values())

    def pack(self, out: torch.Tensor) -> None:
        """See `Gradients`."""
        with torch.no_grad():
            private.copy_in(self._raw, self._taken, out, self.reduction.shard_size)
