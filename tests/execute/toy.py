"""A toy HSDP that the executor drives: flat parameters, no autograd, no FSDP2."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commplan.execute.interface import Layout, Reduction
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis


@dataclass(frozen=True)
class Groups:
    """The process groups of one mesh; None is an axis that it lacks."""

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None

    @property
    def axes(self) -> dict[Axis, int]:
        sizes = {Axis.SHARD: self.shard, Axis.REPLICATE: self.replicate}
        return {axis: group.size() for axis, group in sizes.items() if group is not None}


@dataclass(eq=False)
class ToyUnit:
    """A module of some one-dimensional parameters; `grads` are its reduced shards."""

    name: str
    numels: tuple[int, ...]
    groups: Groups
    all_reduce: bool = True
    grads: dict[int, torch.Tensor] = field(default_factory=dict)

    device = torch.device("cpu")

    @property
    def keeps_partial_sum(self) -> bool:
        return not self.all_reduce

    @property
    def num_shards(self) -> int:
        return 1 if self.groups.shard is None else self.groups.shard.size()

    def partial_reduction(self, dtype: torch.dtype) -> Reduction:
        sum_ = dist.ReduceOp.SUM
        num_ranks = 1
        for group in (self.groups.shard, self.groups.replicate):
            num_ranks *= 1 if group is None else group.size()
        return Reduction(dtype, self.groups.shard, self.groups.replicate, sum_, sum_, postdivide=float(num_ranks))

    def reduce_scatter(self, out: torch.Tensor, source: torch.Tensor, reduction: Reduction) -> dist.Work | None:
        return dist.reduce_scatter_tensor(out, source, reduction.shard_op, reduction.shard_group, async_op=True)

    def gradient_dtype(self, layout: Layout) -> torch.dtype:
        return torch.float32

    def write(self, gradient: torch.Tensor, layout: Layout) -> bool:
        for param, part in zip(layout.params, gradient.split(layout.numels), strict=True):
            self.grads[param] = self.grads[param] + part if param in self.grads else part.clone()
        return False

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole gradient, padded with zeros."""
        numel = -(-whole.numel() // self.num_shards)
        padded = torch.zeros(numel * self.num_shards)
        padded[: whole.numel()] = whole
        at = 0 if self.groups.shard is None else self.groups.shard.rank()
        return padded[at * numel : (at + 1) * numel]

    def gradients(self, of: dict[int, torch.Tensor]) -> ToyGradients:
        """Complete gradients: parameter -> whole gradient."""
        return ToyGradients(self, dict(of))


class ToyGradients:
    """See `commplan.execute.interface.Gradients`."""

    def __init__(self, unit: ToyUnit, of: dict[int, torch.Tensor]) -> None:
        self._of = of
        self._num_shards = unit.num_shards
        self.reduction = unit.partial_reduction(torch.float32)
        self.all_reduce = unit.all_reduce or unit.groups.replicate is None
        self.layout = Layout(tuple(sorted(of)), tuple(-(-of[p].numel() // self._num_shards) for p in sorted(of)))
        self.size_bytes = sum(g.nbytes for g in of.values())

    def pack(self, out: torch.Tensor) -> None:
        rows = out.view(self._num_shards, -1)
        rows.zero_()
        offset = 0
        for param, numel in zip(self.layout.params, self.layout.numels, strict=True):
            padded = out.new_zeros(numel * self._num_shards)
            padded[: self._of[param].numel()] = self._of[param]
            rows[:, offset : offset + numel] = padded.view(self._num_shards, numel)
            offset += numel
        self._of.clear()


def table(units: list[ToyUnit]) -> ModuleTable:
    """The module table of the units."""
    return ModuleTable(
        modules=tuple(
            Module(
                name=unit.name,
                parameters=tuple(Parameter(name=f"p{i}", shape=(numel,)) for i, numel in enumerate(unit.numels)),
                axes=unit.groups.axes,
            )
            for unit in units
        )
    )
