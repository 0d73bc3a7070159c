"""A model as its users have it, trained by stock FSDP2, under schedules, and unsharded: all have to agree."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import commplan
from commplan.fsdp2 import Options
from tests.worlds import models, parity, reference
from tests.worlds.world import Rank

Trace = dict[str, torch.Tensor | None]
"""What a step leaves on this rank, by name."""

Variant = tuple[str, dict[str, int], Options]

WORKERS: Final[Variant] = ("pipelined_allreduce", {}, parity.EAGER)
"""Real threads."""

LATE: Final[Sequence[Variant]] = (
    ("delayed_allreduce", {"k": 3}, parity.LAZY),
    ("bucketed_pipeline_depth2", {}, parity.LAZY),
    ("fsdp2_native", {}, parity.LAZY),
    ("windowed_allreduce", {}, parity.LAZY),
)
"""What threads might hide: lanes as late as a plan allows, on memory that is destroyed."""


def spread(name: str) -> Sequence[Variant]:
    """Threads, and one of the late ones: each meets cases of every file."""
    return (WORKERS, LATE[zlib.crc32(name.encode()) % len(LATE)])


def seeded(rank: int, i: int, *shape: int) -> torch.Tensor:
    """This rank's i-th input."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank + i))


def replicas(here: Rank) -> DeviceMesh:
    """Two replicas, each sharded over half of the ranks."""
    return here.mesh((2, here.size // 2))


def shard_blocks(model: nn.Module, here: Rank) -> nn.Module:
    """Every block of `model.b`, then the root, in two replicas."""
    return models.shard(model, replicas(here))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that forgets nothing: a wrong gradient shows in every later step."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_and_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What ends a training step."""
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module, **kwargs: Any) -> torch.optim.Optimizer:
    """AdamW over every parameter, frozen ones included."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, **kwargs)


def clip_then_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Returns the total norm, which is beyond what it is clipped to."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm.full_tensor() > 0.05
    step_and_zero(model, optimizer)
    return norm.full_tensor()


def on_input(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """One backward, through an input that needs a gradient, as hidden states do."""
    return on_plain_input(model, rank, number, needs_gradient=True)


def on_plain_input(model: nn.Module, rank: int, number: int, *, needs_gradient: bool = False) -> torch.Tensor:
    """One backward, through an input that needs none."""
    loss = model(seeded(rank, number, 3, 4).requires_grad_(needs_gradient)).float().pow(2).sum()
    loss.backward()
    return loss


def accumulated(
    model: nn.Module, rank: int, number: int, *, flag: str = "all_reduce", backward: Callable[..., Any] = on_input
) -> None:
    """Three microbatches, of which only the last has the flag."""
    for i in range(3):
        if hasattr(model, "set_requires_all_reduce"):
            parity.set_flags(model, {flag: i == 2})
        backward(model, rank, 3 * number + i)


def whole_model(model: nn.Module) -> Sequence[nn.Module]:
    """A schedule is attached to the model as such."""
    return [model]


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        make: the unsharded model; called with the same seed for every variant.
        backward: every forward and backward of one optimizer step: (model, rank, number of the step).
        shard: applies FSDP2, and whatever else is done to the model.
        optimizer: makes it, from the sharded model.
        update: what follows backward: (model, optimizer).
        parts: what schedules are attached to, each by itself.
        stock_is_right: False where FSDP2 raises or is wrong, so that only the reference decides.
        has_reference: whether the unsharded model computes the same, but for rounding in the last bits.
        tolerance: of the reference's gradients, absolute.
    """

    make: Callable[[], nn.Module]
    backward: Callable[[nn.Module, int, int], Any]
    shard: Callable[[nn.Module, Rank], nn.Module] = shard_blocks
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum
    update: Callable[[nn.Module, torch.optim.Optimizer], Any] = step_and_zero
    parts: Callable[[nn.Module], Sequence[nn.Module]] = whole_model
    num_steps: int = 3
    stock_is_right: bool = True
    has_reference: bool = True
    tolerance: float = reference.TOLERANCE

    def fresh(self, here: Rank) -> nn.Module:
        """The sharded model, equal on all ranks and in every call."""
        torch.manual_seed(0)
        return self.shard(self.make(), here)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, copied."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def unwrapped(name: str) -> str:
    """A parameter's name without what checkpointing and torch.compile put around modules."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def trace(model: nn.Module, returned: Any) -> Trace:
    """Gradients, parameters, and what the step returned, if that is a tensor or several."""
    found: Trace = {}
    for name, p in model.named_parameters():
        found[f"{name}.grad"] = None if p.grad is None else local(p.grad)
        found[name] = local(p)
    values = returned if isinstance(returned, Sequence) else [returned]
    found |= {f"returned[{i}]": local(value) for i, value in enumerate(values) if isinstance(value, torch.Tensor)}
    return found


def train(case: Case, model: nn.Module, here: Rank, check: Callable[[nn.Module], None] | None = None) -> Iterator[Trace]:
    """What each step leaves before it is applied, then what is there in the end."""
    optimizer = case.optimizer(model)
    for number in range(case.num_steps):
        returned = case.backward(model, here.rank, number)
        if check is not None and number == 0:
            check(model)
        yield trace(model, returned)
        yield trace(model, case.update(model, optimizer))


def compare(here: Rank, case: Case, variants: Sequence[Variant]) -> None:
    """Train under stock FSDP2 and under every variant: bit-equal; the first step's gradients as the reference has them."""
    expected = list(train(case, case.fresh(here), here)) if case.stock_is_right else []
    check = None
    if case.has_reference:
        right = reference.gradients(case.make, here.size, lambda model, rank: case.backward(model, rank, 0))

        def check(model: nn.Module) -> None:
            reference.assert_close(model, {n: right[unwrapped(n)] for n, _ in model.named_parameters()}, case.tolerance)

    for schedule, params, options in variants:
        model = case.fresh(here)
        with ExitStack() as attached:
            attachments = [
                attached.enter_context(commplan.attach(part, schedule, options=options, **params)) for part in case.parts(model)
            ]
            found = list(train(case, model, here, check))
            for attachment in attachments:
                report = attachment.last_backward
                assert report is not None
                assert report.peak_bytes <= report.declared_peak_bytes, schedule
        for number, (mine, stock) in enumerate(zip(found, expected, strict=case.stock_is_right)):
            parity.assert_equal(mine, stock, f"{schedule}, step {number // 2}")


@functools.cache
def mesh_of(ranks: tuple[Any, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """The mesh of these ranks; made once in a process, like `Rank.mesh`."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def fully_sharded(*modules: nn.Module, here: Rank, **kwargs: Any) -> None:
    """Shard each of `modules` by itself, in this order, in two replicas."""
    for module in modules:
        fully_shard(module, mesh=replicas(here), **kwargs)
