"""A toy HSDP that the executor drives: flat parameters, no autograd, no FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commplan.execute.interface import Layout, Reduction
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis


@dataclass(frozen=True)
class Groups:
    """The process groups of one mesh; None is an axis that it lacks. `own`: those of lanes with communicators of their own."""

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    own: tuple[tuple[str, dist.ProcessGroup], ...] = ()

    @property
    def axes(self) -> dict[Axis, int]:
        sizes = {Axis.SHARD: self.shard, Axis.REPLICATE: self.replicate}
        return {axis: group.size() for axis, group in sizes.items() if group is not None}


@dataclass(eq=False)
class ToyUnit:
    """A module of some one-dimensional parameters; `grads` are its reduced shards,
    `gathered` what all-gathers brought, one row a rank,
    `kept` whole gradients that were not handed over yet."""

    name: str
    numels: tuple[int, ...]
    groups: Groups
    all_reduce: bool = True
    grads: dict[int, torch.Tensor] = field(default_factory=dict)
    gathered: list[torch.Tensor] = field(default_factory=list)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    device = torch.device("cpu")

    def __post_init__(self) -> None:
        self.place = torch.empty(-(-self.numels[0] // self.num_shards) * self.num_shards)

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
        # As frameworks do for a narrow range: part of the division comes before.
        predivide = 2.0 if dtype is torch.float16 else None
        postdivide = num_ranks / (predivide or 1.0)
        return Reduction(dtype, self.groups.shard, self.groups.replicate, sum_, sum_, predivide, postdivide)

    def group(self, communicator: str) -> dist.ProcessGroup | None:
        return {"shard": self.groups.shard, "replicate": self.groups.replicate, **dict(self.groups.own)}.get(communicator)

    def pack(self, gradients: Sequence[torch.Tensor], out: torch.Tensor, shard_size: int) -> None:
        rows = out.view(shard_size, -1)
        rows.zero_()
        offset = 0
        for gradient in gradients:
            numel = -(-gradient.numel() // shard_size)
            padded = out.new_zeros(numel * shard_size)
            padded[: gradient.numel()] = gradient
            rows[:, offset : offset + numel] = padded.view(shard_size, numel)
            offset += numel

    def reduce_scatter(
        self, out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, reduction: Reduction
    ) -> dist.Work | None:
        return dist.reduce_scatter_tensor(out, source, reduction.shard_op, group, async_op=True)

    def shards_to_gather(self) -> Sequence[torch.Tensor] | None:
        if self.groups.shard is None:
            return None
        return [self._shard(param, self.groups.shard.rank()) for param in range(len(self.numels))]

    def all_shards(self) -> torch.Tensor:
        """What an all-gather of this unit has to bring, one row a rank."""
        rows = [[self._shard(param, rank) for param in range(len(self.numels))] for rank in range(self.num_shards)]
        return torch.stack([torch.cat(row) for row in rows])

    def _shard(self, param: int, rank: int) -> torch.Tensor:
        """The parameter's shard on a rank of the shard group: numbers that no other module, parameter or rank has."""
        numel = -(-self.numels[param] // self.num_shards)
        return torch.arange(numel, dtype=torch.float32) + 10 * rank + 100 * param + 1000 * sum(map(ord, self.name))

    def all_gather(self, out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        return dist.all_gather_into_tensor(out, source, group, async_op=True)

    def place_to_gather(self) -> torch.Tensor | None:
        if len(self.numels) != 1:
            return None
        self.place.untyped_storage().resize_(self.place.nbytes)
        return self.place

    def leave_place(self) -> None:
        self.place.untyped_storage().resize_(0)

    def set_parameters(self, gathered: torch.Tensor) -> None:
        self.gathered.append(gathered.clone())

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

    @property
    def kept_bytes(self) -> int:
        """Bytes of the whole gradients that were not handed over."""
        return sum(gradient.nbytes for gradient in self.kept.values())

    def add(self, of: dict[int, torch.Tensor], *, is_wide: bool) -> None:
        """Whole gradients that compute made: they are added to what was kept."""
        for param, gradient in of.items():
            new = gradient.double() if is_wide else gradient
            self.kept[param] = self.kept[param] + new if param in self.kept else new

    def take_kept(self) -> dict[int, torch.Tensor]:
        """Hand over what was kept."""
        taken, self.kept = self.kept, {}
        return taken

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

    def take(self) -> list[torch.Tensor]:
        return [self._of.pop(param) for param in self.layout.params]

    def take_as_sent(self, dtype: torch.dtype) -> torch.Tensor | None:
        (numel, *more), (gradient, *_) = self.layout.numels, self._of.values()
        fits = not more and gradient.dtype == dtype and gradient.numel() == numel * self._num_shards
        # What the tests compare with may be the same memory.
        return self._of.popitem()[1].clone() if fits else None


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
