"""FSDP2's parameter groups as the executor's units: its packing, reduce ops, factors, casts and accumulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commplan.execute.interface import Layout, Reduction
from commplan.execute.packing import without_grad
from commplan.fsdp2 import torch_gradients, torch_parameters
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.groups import Group
from commplan.ops import Axis

OwnGroups = Mapping[str, dist.ProcessGroup]
"""Communicator of a plan -> the process group behind it, which nothing else uses; none for axes that the mesh lacks."""


class FsdpUnit:
    """One parameter group. See `commplan.execute.interface.Unit`.

    Attributes:
        shard_size: ranks that share one copy of the parameters.
        parameters: the group's, on their way through an all-gather.
    """

    def __init__(self, group: Group, own: OwnGroups) -> None:
        self.raw = group.raw
        self._name = group.name
        self._own = own
        self._all_gather = torch_parameters.default_all_gather(group.raw)
        self._facts = private.param_facts(group.raw)
        self._shard, self._replicate = own.get(Axis.SHARD), own.get(Axis.REPLICATE)
        self.shard_size = 1 if self._shard is None else self._shard.size()
        self.parameters = torch_parameters.Parameters(group.raw)
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._reductions: dict[tuple[object, ...], Reduction] = {}
        self._shard_dims = {p: facts.shard_dim for p, facts in enumerate(self._facts) if facts.shard_dim != 0}
        self._shard_numels = [torch_gradients.shard_numel(group.raw, p, self.shard_size) for p in range(len(self._facts))]

    @property
    def name(self) -> str:
        """The name of the sharded module."""
        return self._name

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        return self.raw.device

    @property
    def gathers_by_default(self) -> bool:
        """Whether the all-gather is FSDP2's own, and none that a user put in its place."""
        return self._all_gather is not None

    @property
    def keeps_partial_sum(self) -> bool:
        """FSDP2's flags, as they stand now."""
        return not (self.raw.reduce_grads and self.raw.all_reduce_grads)

    @property
    def kept_bytes(self) -> int:
        """Bytes of whole gradients that wait for a later backward."""
        return torch_gradients.accumulated_bytes(self.raw)

    def take_gradients(self, *, keeps: bool = False) -> FsdpGradients | None:
        """Do FSDP2's own bookkeeping after a backward of the group; what it left to reduce, if anything.

        Args:
            keeps: leave them to a later backward.
        """
        taken = torch_gradients.take_gradients(self.raw, self.parameters, keeps=keeps)
        if not taken:
            return None
        positions = tuple(taken)
        layout = self._layouts.get(positions)
        if layout is None:
            layout = self._layouts[positions] = Layout(positions, tuple(self._shard_numels[p] for p in positions))
        # FSDP2 asserts that what is trainable in one group has one dtype.
        reduction = self.partial_reduction(self._facts[positions[0]].reduce_dtype)
        all_reduce = reduction.replicate_group is None or self.raw.all_reduce_grads
        return FsdpGradients(self.raw, taken, layout, reduction, all_reduce, self._shard_dims)

    def partial_reduction(self, dtype: torch.dtype) -> Reduction:
        """How FSDP2 would reduce this group in `dtype`."""
        settings = dtype, *torch_gradients.scaling(self.raw)
        if settings not in self._reductions:
            factors = torch_gradients.factors(self.raw, self._shard, self._replicate, dtype)
            self._reductions[settings] = Reduction(
                dtype,
                self._shard,
                self._replicate,
                factors.shard_op,
                factors.replicate_op,
                factors.predivide,
                factors.postdivide,
                factors.local_divide,
            )
        return self._reductions[settings]

    def group(self, communicator: str) -> dist.ProcessGroup | None:
        """See `Unit`."""
        return self._own.get(communicator)

    def pack(self, gradients: Sequence[torch.Tensor], out: torch.Tensor, shard_size: int) -> None:
        """See `Unit`."""
        with without_grad():
            torch_gradients.copy_in(gradients, out, shard_size)

    def reduce_scatter(
        self, out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, reduction: Reduction
    ) -> dist.Work | None:
        """See `Unit`."""
        return torch_gradients.reduce_scatter(self.raw, out, source, group, reduction.shard_op)

    def shards_to_gather(self) -> Sequence[torch.Tensor] | None:
        """See `Unit`."""
        if self.shard_size == 1 or self._all_gather is None:
            return None
        return self.parameters.shards_to_gather()

    def all_gather(self, out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """See `Unit`."""
        assert self._all_gather is not None
        return self._all_gather(out, source, group)

    def place_to_gather(self) -> torch.Tensor | None:
        """See `Unit`."""
        return self.parameters.place_to_gather()

    def leave_place(self) -> None:
        """See `Unit`."""
        self.parameters.leave_place()

    def set_parameters(self, gathered: torch.Tensor) -> None:
        """See `Unit`."""
        assert self._shard is not None
        self.parameters.set_whole(gathered, self._shard)

    def gradient_dtype(self, layout: Layout) -> torch.dtype:
        """See `Unit`."""
        return self._facts[layout.params[0]].orig_dtype

    def write(self, gradient: torch.Tensor, layout: Layout) -> bool:
        """See `Unit`."""
        with without_grad():
            return torch_gradients.write_grads(self.raw, layout.params, layout.offsets, gradient)


@dataclass(slots=True)
class FsdpGradients:
    """Gradients of one group. See `commplan.execute.interface.Gradients`."""

    raw: private.ParamGroup
    taken: dict[int, torch.Tensor]
    layout: Layout
    reduction: Reduction
    all_reduce: bool
    shard_dims: Mapping[int, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of the unsharded gradients that were not packed yet."""
        return sum(g.nbytes for g in self.taken.values())

    def take(self) -> list[torch.Tensor]:
        """See `Gradients`."""
        with without_grad():
            return torch_gradients.laid_out(self.taken, self.shard_dims, self.reduction.shard_size)

    def take_as_sent(self, dtype: torch.dtype) -> torch.Tensor | None:
        """See `Gradients`."""
        if len(self.taken) > 1 or self.layout.numel * self.reduction.shard_size != next(iter(self.taken.values())).numel():
            return None
        return torch_gradients.take_as_sent(self.raw, self.taken, self.reduction.shard_size, dtype)
