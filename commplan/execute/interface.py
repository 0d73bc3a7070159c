"""Where the executor meets a sharded model: what a framework has to provide to be driven by a plan.

A framework implements `Unit`, once per module of the plan, and makes four calls on the executor in each backward, all from
the thread that runs backward:

    executor.pre_backward(i)            before compute of the module that is needed i-th
    executor.complete(n, gradients)     the gradients of module n are complete (may come twice; may come late or never)
    executor.root()                     all gradients are complete; returns when every one is applied
    executor.abort()                    the backward that was under way raised: drop what is left of it

`with executor.collecting():` holds hooks back while gradients come in no useful order, until root.  The executor never
looks at a parameter and never chooses a group: both belong to the unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parameters a flat shard holds, in which order.

    Attributes:
        params: positions in the module's list of parameters, ascending.
        numels: elements of each one's shard, padding included; the flat shard is their concatenation.
    """

    params: tuple[int, ...]
    numels: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat shard."""
        return sum(self.numels)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the gradients of one module are reduced; the same on every rank.

    A gradient is divided by `predivide`, reduce-scattered with `shard_op` over `shard_group`, all-reduced with
    `replicate_op` over `replicate_group` and divided by `postdivide`.  Without a shard group, or with one of a single rank,
    the reduce-scatter is a copy, divided by `local_divide`.  A group of None is an axis that the mesh lacks.
    """

    dtype: torch.dtype
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    shard_op: dist.ReduceOp | dist.ReduceOp.RedOpType
    replicate_op: dist.ReduceOp | dist.ReduceOp.RedOpType
    predivide: float | None = None
    postdivide: float | None = None
    local_divide: float | None = None

    @property
    def shard_size(self) -> int:
        """Ranks in the shard group."""
        return 1 if self.shard_group is None else self.shard_group.size()


class Gradients(Protocol):
    """The complete gradients of one module in one backward, not yet reduced. Holds the only references to them."""

    @property
    def layout(self) -> Layout:
        """Where each gradient will lie in the flat shard."""

    @property
    def reduction(self) -> Reduction:
        """How they are to be reduced."""

    @property
    def all_reduce(self) -> bool:
        """Whether this backward all-reduces them; if not, the executor keeps the shard as a partial sum."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the unsharded gradients."""

    def pack(self, out: torch.Tensor) -> None:
        """Copy the gradients into `out` and drop them.

        Args:
            out: shape (shard_size * layout.numel,), `reduction.dtype`; one flat shard after another, in rank order.
        """


class Unit(Protocol):
    """One module of the plan."""

    @property
    def name(self) -> str:
        """The module's name in messages."""

    @property
    def device(self) -> torch.device:
        """Where its communication buffers live."""

    @property
    def keeps_partial_sum(self) -> bool:
        """False if a partial sum that an earlier backward left is to be all-reduced now, gradients or not."""

    def partial_reduction(self, dtype: torch.dtype) -> Reduction:
        """How a partial sum of this dtype is reduced in a backward that brought no new gradients."""

    def reduce_scatter(self, out: torch.Tensor, source: torch.Tensor, reduction: Reduction) -> dist.Work | None:
        """Start the reduce-scatter of `source` (see `Gradients.pack`) into `out`, shape (layout.numel,)."""

    def gradient_dtype(self, layout: Layout) -> torch.dtype:
        """The dtype of the parameters' `.grad`."""

    def write(self, gradient: torch.Tensor, layout: Layout) -> bool:
        """Hand the reduced shard (shape (layout.numel,), `gradient_dtype`, final scale) to `.grad`: set it or add to it.

        Then run the user's hooks.

        Runs on the thread of compute, whatever the lane of the apply: `.grad` and hooks are the user's.

        Returns:
            True if `.grad` now views `gradient`, so that it must not be written again.
        """
