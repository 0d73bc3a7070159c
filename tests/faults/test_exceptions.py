"""Exceptions of the user's code, anywhere: after zero_grad the next step is exact, nothing stays pending, detach restores."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import commplan
from commplan.fsdp2 import torch_private
from tests.worlds import models, parity
from tests.worlds.lazy import PoisonedMemory
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]
STEPS: Sequence[parity.Step] = [parity.PLAIN, parity.NO_ALL_REDUCE]

ACCUMULATION: dict[str, parity.Step] = {
    "none": parity.PLAIN,
    "no sync": [{"sync": False}, {}],
    "no all-reduce": [{"all_reduce": False}, {}],
    "both": [{"sync": False}, {"all_reduce": False}, {}],
}


WHERE = ("forward", "forward's end", "backward", "backward's end")


class BoomError(Exception):
    """What the user's code raises."""


class Boom(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise BoomError


@contextmanager
def exploding(module: nn.Module, where: str) -> Iterator[None]:
    """Inside, `module` raises: "forward" or "forward's end"; "backward", before its own; "backward's end", behind it."""
    original = module.forward

    def raises(*args: Any) -> Any:
        if where == "forward":
            raise BoomError
        inputs = [Boom.apply(args[0].requires_grad_() if args[0].is_leaf else args[0])] if where == "backward's end" else args
        out = original(*inputs)
        if where == "forward's end":
            raise BoomError
        return Boom.apply(out) if where == "backward" else out

    module.forward = raises  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward


def places(model: Any) -> dict[str, nn.Module]:
    """Every sharded module, and one inside of one."""
    return {"(root)": model, "head": model.head, **{f"b.{i}": block for i, block in enumerate(model.b)}}


def state_of(model: nn.Module) -> dict[str, Any]:
    """All attributes of FSDP2's states and groups, and how many hooks each module has."""
    found: dict[str, Any] = {}
    for name, state in torch_private.states(model):
        for i, owner in enumerate((state, *torch_private.groups(state))):
            for key, value in vars(owner).items():
                shown = value if isinstance(value, bool | int | str | type(None)) else type(value).__name__
                found[f"{name}/{i}/{key}"] = shown
    for name, module in model.named_modules():
        found[f"{name}/hooks"] = (len(module._forward_pre_hooks), len(module._forward_hooks), len(module._backward_hooks))
        found[f"{name}/attributes"] = sorted(vars(module))
    found["optimizer hooks"] = len(optimizers._global_optimizer_pre_hooks)
    found["threads"] = sorted(t.name for t in threading.enumerate() if t.name.startswith("commplan"))
    return found


class Trainer:
    """Trains FN from its first values, with an optimizer that was made before anything was gathered."""

    def __init__(self, here: Rank) -> None:
        self.here = here
        self.model: Any = parity.build(FN, here, (2, 2), {})
        self.parameters: list[Any] = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.initial = [p.to_local().clone() for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def gradients(self, num_steps: int = len(STEPS)) -> list[dict[str, torch.Tensor | None]]:
        """Those of each of the first of `STEPS`, from the first values on."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.initial, strict=True):
                parameter.to_local().copy_(value)
        found = []
        i = 0
        for step in STEPS[:num_steps]:
            for flags in step:
                parity.set_flags(self.model, flags)
                FN.loss(self.model(FN.batch(self.here.rank, i)), self.here.rank).backward()
                i += 1
            grads = (None if p.grad is None else p.grad.to_local().clone() for p in self.parameters)
            found.append(dict(zip(self.names, grads, strict=True)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found


def interrupted_step(trainer: Trainer, place: str, where: str, step: parity.Step, at: int) -> None:
    """The microbatches of `step`, of which number `at` raises; then zero_grad, as a user would."""
    model, here = trainer.model, trainer.here
    for i, flags in enumerate(step[: at + 1]):
        parity.set_flags(model, flags)
        if i < at:
            FN.loss(model(FN.batch(here.rank, 7 + i)), here.rank).backward()
        else:
            with exploding(places(model)[place], where), pytest.raises(BoomError):
                FN.loss(model(FN.batch(here.rank, 7 + i)), here.rank).backward()
    trainer.optimizer.zero_grad()


def assert_exact(trainer: Trainer, expected: list[dict[str, torch.Tensor | None]], where: str) -> None:
    """The next steps, as many as there are in `expected`, are as they would have been."""
    for number, (mine, right) in enumerate(zip(trainer.gradients(len(expected)), expected, strict=True)):
        parity.assert_equal(mine, right, f"{where}, step {number}")


def after_exceptions(here: Rank, schedules: Sequence[parity.Schedule], accumulation: str, lazy: bool) -> None:
    step = ACCUMULATION[accumulation]
    trainer = Trainer(here)
    expected = trainer.gradients()
    fresh = state_of(trainer.model)
    memories: list[Any] = []

    def remembered() -> Any:
        memories.append(PoisonedMemory())
        return memories[-1]

    options = replace(parity.LAZY if lazy else parity.EAGER, make_memory=remembered)
    for schedule, params in schedules:
        label = f"{schedule} {params}"
        attachment = commplan.attach(trainer.model, schedule, options=options, **params)
        for where in WHERE:
            for place in places(trainer.model):
                for at in range(len(step)):
                    if lazy and at == 0 and "forward" in where:
                        continue  # Nothing can be pending yet; without lazy lanes it is tried.
                    interrupted_step(trainer, place, where, step, at)
                    # Whatever was left would be in the very next backward; accumulation is tried at two places as well.
                    after = expected if at == len(step) - 1 and place in ("(root)", "b.1") else expected[:1]
                    assert_exact(trainer, after, f"{label}: {where} of {place}, microbatch {at}")
                    assert memories[-1].live_bytes == 0, label
        interrupted_step(trainer, "b.1", "backward", step, len(step) - 1)
        attachment.detach()
        assert memories[-1].live_bytes == 0, label
        parity.set_flags(trainer.model, {})
        assert_exact(trainer, expected, f"stock after {label}")
        gc.collect()
        assert state_of(trainer.model) == fresh, label


@pytest.mark.report("composer#3866", "torchtitan#1329", "torchtitan#1929", "torchtitan#4505")
@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_every_place_under_different_schedules(worlds: Worlds, accumulation: str) -> None:
    arguments = {"schedules": parity.DIFFERENT, "accumulation": accumulation, "lazy": False}
    worlds.of(4).run(after_exceptions, **arguments)


@pytest.mark.report("composer#3866", "torchtitan#1329", "torchtitan#1929", "torchtitan#4505")
@pytest.mark.parametrize("accumulation", ["none", "both"])
@pytest.mark.parametrize("schedule", parity.DISTINCT, ids=[name for name, _ in parity.DISTINCT])
def test_every_schedule_with_all_collectives_held_back(worlds: Worlds, schedule: parity.Schedule, accumulation: str) -> None:
    """Whatever can be pending is pending when the exception comes, and every buffer is destroyed when it is given back."""
    worlds.of(4).run(after_exceptions, schedules=[schedule], accumulation=accumulation, lazy=True)


class HookError(Exception):
    """What a hook of the user's raises."""


def in_hooks(here: Rank) -> None:
    """A hook that runs after a gradient is accumulated raises, inside root or before."""
    for schedule, params in parity.DISTINCT:
        model = models.shard(models.fk(4), here.mesh((2, 2)))
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for parameter in model.parameters():

                def raises(_: torch.Tensor) -> None:
                    raise HookError

                handle = parameter.register_post_accumulate_grad_hook(raises)
                with pytest.raises(HookError):
                    ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
                handle.remove()
                model.zero_grad()
                ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
                found = [p.grad.to_local().unique().tolist() for p in model.parameters()]  # type: ignore[union-attr]
                assert found == [[2.5], [5.0], [7.5], [10.0]], schedule
                model.zero_grad()


def test_hooks_of_the_user(worlds: Worlds) -> None:
    worlds.of(4).run(in_hooks)
