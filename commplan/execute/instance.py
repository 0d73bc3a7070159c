"""One reduction of one module: its gradients on their way to `.grad`, and partial sums between backwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from commplan.execute.interface import Gradients, Layout, Reduction, Unit
from commplan.execute.lanes import Token
from commplan.execute.memory import Memory
from commplan.ops import Kind, OpId


@dataclass(slots=True)
class PartialSum:
    """Shards that were reduce-scattered, but not all-reduced yet: `buffer` has shape (layout.numel,)."""

    layout: Layout
    buffer: torch.Tensor


@dataclass(slots=True)
class Instance:
    """The state of one reduction.

    Attributes:
        gradients: what autograd left; None once packed, or where only a partial sum is to be reduced.
        layout: what `shard` holds.
        all_reduce: False if this backward ends with a partial sum.
        held_bytes: unsharded gradients that memory counts because they outlive their hook, in the dtype that they have.
        shard: the reduced shard, all-reduced in place.
        inputs: what the reduce-scatter reads besides: the packed gradients, a partial sum that is added on the lane.
        copies: what ops make for the wire, by op; of a bucket its first member has them.
        last: the token of the last op that touches the shard.
        gradient: the shard in the parameters' dtype, filled by the apply; from then on until `.grad` has it.
        is_written: `.grad` has it.
        is_grad: `.grad` views the shard, so it no longer is communication memory.
        is_agreed: its first collective was issued, so that ranks need not be asked again.
    """

    unit: Unit
    reduction: Reduction
    layout: Layout
    all_reduce: bool
    gradients: Gradients | None = None
    held_bytes: int = 0
    shard: torch.Tensor | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    copies: dict[OpId, list[torch.Tensor]] = field(default_factory=dict)
    last: Token | None = None
    gradient: torch.Tensor | None = None
    is_written: bool = False
    is_grad: bool = False
    is_agreed: bool = False

    @classmethod
    def of(cls, unit: Unit, gradients: Gradients) -> Instance:
        """The reduction of gradients that just became complete."""
        return cls(unit, gradients.reduction, gradients.layout, gradients.all_reduce, gradients)

    @classmethod
    def of_partial_sum(cls, unit: Unit, partial: PartialSum) -> Instance:
        """The reduction of a partial sum alone."""
        return cls(unit, unit.partial_reduction(partial.buffer.dtype), partial.layout, True, shard=partial.buffer)

    def in_words(self) -> str:
        """What ranks have to have in common."""
        return f"parameters {self.layout.params} in {self.reduction.dtype}, all-reduce {self.all_reduce}"

    def is_owed(self, kind: Kind) -> bool:
        """Whether an op of this reduction that was issued has no effect yet: an apply, until `.grad` has the gradient."""
        return kind is Kind.APPLY and self.gradient is not None

    def hold_gradients(self, memory: Memory) -> None:
        """Count the gradients as communication memory: they outlive their hook."""
        if self.gradients is not None and self.held_bytes == 0:
            self.held_bytes = self.gradients.size_bytes
            memory.hold(self.held_bytes)

    def take_gradients(self) -> list[torch.Tensor]:
        """Let go of the gradients, see `Gradients.take`; `drop_held` tells memory when the caller did too."""
        assert self.gradients is not None
        taken = self.gradients.take()
        self.gradients = None
        return taken

    def drop_held(self, memory: Memory) -> None:
        """The gradients are gone."""
        memory.drop(self.held_bytes)
        self.held_bytes = 0

    def release_inputs(self, memory: Memory) -> None:
        """Give back what the reduce-scatter read."""
        while self.inputs:
            memory.release(self.inputs.pop())

    def release_copies(self, memory: Memory, op: OpId | None = None) -> None:
        """Give back what an op made for the wire; without `op`, what all of them did."""
        for name in [op] if op is not None else list(self.copies):
            for copy in self.copies.pop(name, ()):
                memory.release(copy)

    def write(self) -> None:
        """Give `.grad` what the apply left, on the thread of compute, which must be behind it."""
        if self.gradient is not None:
            is_view = self.unit.write(self.gradient, self.layout)
            self.is_grad = is_view and self.gradient is self.shard
            self.gradient = None
            self.is_written = True

    def release_shard(self, memory: Memory) -> None:
        """Give back the shard, unless it was left as a partial sum."""
        if self.shard is not None and self.is_written:
            memory.release(self.shard, kept=self.is_grad)
            self.shard = None


def for_narrow_wire(unit: Unit, reduction: Reduction) -> Reduction:
    """`reduction` with factors that keep fp16 from overflowing; they suit any other dtype too.

    All ops of a module, and partial sums between them, have to have the same factors.
    """
    return replace(unit.partial_reduction(torch.float16), dtype=reduction.dtype)


def merge_layouts(one: Layout, other: Layout) -> Layout:
    """The layout that holds the parameters of both."""
    numels = dict(zip(one.params + other.params, one.numels + other.numels, strict=True))
    params = tuple(sorted(numels))
    return Layout(params, tuple(numels[p] for p in params))


def add_into(total: torch.Tensor, layout: Layout, part: torch.Tensor, part_layout: Layout) -> None:
    """Add `part` to `total` parameter by parameter; `layout` must hold every parameter of `part_layout`."""
    offset_of: dict[int, int] = {}
    offset = 0
    for param, numel in zip(layout.params, layout.numels, strict=True):
        offset_of[param] = offset
        offset += numel
    offset = 0
    for param, numel in zip(part_layout.params, part_layout.numels, strict=True):
        total.narrow(0, offset_of[param], numel).add_(part.narrow(0, offset, numel))
        offset += numel
