"""Where the executor meets a sharded model: what a framework has to provide to be driven by a plan.

A framework implements `Unit`, once per module of the plan, and makes these calls on the executor in each backward, all from
the thread that runs backward:

    executor.begin()                    a backward begins: whether it is the last of its step, what will be gathered
    executor.pre_backward(i)            before compute of the module that is needed i-th
    executor.complete(n, gradients)     the gradients of module n are complete (may come twice; may come late or never)
    executor.keep(n, size_bytes)        instead, where `keeps_whole(n)`: they are complete, and wait for a later backward
    executor.root()                     all gradients are complete; returns when every one is applied
    executor.abort()                    the backward that was under way raised: drop what is left of it

Around them it may tell `executor.rhythm` how its hooks follow each other.

`with executor.collecting():` holds hooks back while gradients come in no useful order, until root.  The executor never
looks at a parameter and never chooses a group: both belong to the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Layout:
    """Which parameters a flat shard holds, in which order.

    Attributes:
        params: positions in the module's list of parameters, ascending.
        numels: elements of each one's shard, padding included; the flat shard is their concatenation.
    """

    params: tuple[int, ...]
    numels: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Elements of the flat shard."""
        return sum(self.numels)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter's shard begins in the flat shard."""
        return tuple(accumulate(self.numels[:-1], initial=0)) if self.numels else ()


@dataclass(frozen=True)
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

    @cached_property
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

    def take(self) -> list[torch.Tensor]:
        """Let go of the gradients.

        Returns:
            One for each parameter of the layout, laid out so that the flat elements, padded at the end to shard_size times
            as many as the layout says, are one shard after another in rank order.
        """

    def take_as_sent(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Let go of a gradient that need not be packed.

        Returns:
            The only gradient, flat, if it is just what the module's ranks are to be sent: in `dtype`, one shard after
            another without padding, in memory of its own to which nobody else refers.  Else None, and nothing was let go.
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

    def group(self, communicator: str) -> dist.ProcessGroup | None:
        """The process group behind a communicator of the plan ("shard", "replicate@outer"); None over an axis that it lacks."""

    def pack(self, gradients: Sequence[torch.Tensor], out: torch.Tensor, shard_size: int) -> None:
        """Copy gradients that were taken, perhaps of several units, into `out`.

        Args:
            out: shape (shard_size * shard elements of all,), any floating dtype; for one rank after another the flat shard of
                each gradient, padded with zeros.
        """

    def reduce_scatter(
        self, out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, reduction: Reduction
    ) -> dist.Work | None:
        """Start the reduce-scatter of `source`, shape (group size * n,), into `out`, shape (n,)."""

    def shards_to_gather(self) -> Sequence[torch.Tensor] | None:
        """What this rank gives to an all-gather of the unit's parameters: flat shards of one dtype, equally long on all ranks.

        None if there is nothing for a plan to gather, alike on all ranks: parameters are whole, or the framework has to
        gather them itself.
        """

    def place_to_gather(self) -> torch.Tensor | None:
        """Where an all-gather of what `shards_to_gather` gave may put its result at once, shape (ranks * elements,); None if
        there is no such place.  `set_parameters` or `leave_place` follows.
        """

    def leave_place(self) -> None:
        """What was gathered into `place_to_gather` is not needed."""

    def all_gather(self, out: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Start the all-gather of `source`, shape (n,), into `out`, shape (group size * n,), of which it may be a part."""

    def set_parameters(self, gathered: torch.Tensor) -> None:
        """Make the parameters whole, on the thread of compute.

        Args:
            gathered: shape (ranks, elements that one rank gave); a row may be part of a longer one.  It may be a view of
                `place_to_gather`.
        """

    def gradient_dtype(self, layout: Layout) -> torch.dtype:
        """The dtype of the parameters' `.grad`."""

    def write(self, gradient: torch.Tensor, layout: Layout) -> bool:
        """Hand the reduced shard (shape (layout.numel,), `gradient_dtype`, final scale) to `.grad`: set it or add to it.

        Then run the user's hooks.

        Runs on the thread of compute, whatever the lane of the apply: `.grad` and hooks are the user's.

        Returns:
            True if `.grad` now views `gradient`, so that it must not be written again.
        """
