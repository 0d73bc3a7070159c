"""What stands behind backward: optimizers of every kind, clipping, gradient scaling, optimizers inside backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.models.comparing import (
    Case,
    Trace,
    accumulated,
    adamw,
    clip_then_step,
    compare,
    local,
    on_input,
    seeded,
    spread,
    step_and_zero,
)
from tests.worlds import models
from tests.worlds.world import Rank, Worlds


def zeros_stay(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`.grad` is zeroed in place, so that the next backward adds to it."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients pile up over steps, in `.grad` itself."""
    optimizer.step()


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trace:
    """Somebody keeps a gradient over the next backward: what was handed out is not written again."""
    holder = vars(model).setdefault("kept_gradients", [])
    for grad, copy in holder:
        assert torch.equal(local(grad), copy)
    holder.extend((p.grad, local(p.grad)) for p in model.parameters() if p.grad is not None)
    step_and_zero(model, optimizer)
    return {}


class InBackward:
    """Each parameter has an optimizer of its own that steps as soon as its gradient is there."""

    def __init__(self, model: nn.Module, *, set_to_none: bool) -> None:
        self._set_to_none = set_to_none
        self._optimizers = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: nn.Parameter) -> None:
        optimizer = self._optimizers[parameter]
        optimizer.step()
        optimizer.zero_grad(set_to_none=self._set_to_none)


def nothing(model: nn.Module, optimizer: object) -> None:
    """All was done in backward."""


class Scaled:
    """GradScaler around SGD; one step overflows."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        model.scaler = self.scaler


def scaled(model: nn.Module, rank: int, number: int) -> None:
    out = model(seeded(rank, number, 3, 4).half()).float().pow(2).sum()
    # Only one rank overflows; all have to skip the step.
    factor = 1e30 if (rank, number) == (1, 1) else 1.0
    model.scaler.scale(out * factor).backward()


def scaler_step(model: nn.Module, scaled: Scaled) -> list[torch.Tensor]:
    scaled.scaler.unscale_(scaled.optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaled.scaler.step(scaled.optimizer)
    scaled.scaler.update()
    scaled.optimizer.zero_grad()
    return [norm.full_tensor(), torch.tensor(scaled.scaler.get_scale())]


def half(model: nn.Module, here: Rank) -> nn.Module:
    return models.shard(model, here.mesh((2, 2)), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))


CASES = {
    "AdamW foreach": Case(models.Net, on_input, optimizer=partial(adamw, foreach=True)),
    "AdamW one by one": Case(models.Net, on_input, optimizer=partial(adamw, foreach=False)),
    "AdamW fused": Case(models.Net, on_input, optimizer=partial(adamw, fused=True)),
    "AdamW fused, accumulated": Case(
        models.Net, partial(accumulated, flag="all_reduce"), optimizer=partial(adamw, fused=True), tolerance=3e-6
    ),
    "clipped": Case(models.Net, on_input, optimizer=adamw, update=clip_then_step),
    "clipped, accumulated": Case(
        models.Net, partial(accumulated, flag="sync"), optimizer=adamw, update=clip_then_step, tolerance=3e-6
    ),
    "zeroed in place": Case(models.Net, on_input, update=zeros_stay),
    "never zeroed": Case(models.Net, on_input, update=never_zeroed),
    "gradients kept": Case(models.Net, on_input, update=kept),
    "in backward": Case(
        models.Net, on_input, optimizer=partial(InBackward, set_to_none=True), update=nothing, has_reference=False
    ),
    "in backward, zeroed in place": Case(
        models.Net, on_input, optimizer=partial(InBackward, set_to_none=False), update=nothing, has_reference=False
    ),
    "in backward, accumulated": Case(
        models.Net,
        partial(accumulated, flag="all_reduce"),
        optimizer=partial(InBackward, set_to_none=True),
        update=nothing,
        has_reference=False,
    ),
    "gradient scaler, fp16": Case(
        models.Net, scaled, half, optimizer=Scaled, update=scaler_step, num_steps=4, has_reference=False
    ),
}


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.parametrize("name", CASES)
def test_optimizers(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)
