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


def interrupted_step(model: nn.Module, here: Rank, place: str, where: str, step: parity.Step, at: int) -> None:
    """The microbatches of `step`, of which number `at` raises; then zero_grad, as a user would."""
    for i, flags in enumerate(step[: at + 1]):
        parity.set_flags(model, flags)
        if i < at:
            FN.loss(model(FN.batch(here.rank, 7 + i)), here.rank).backward()
        else:
            with exploding(places(model)[place], where), pytest.raises(BoomError):
                FN.loss(model(FN.batch(here.rank, 7 + i)), here.rank).backward()
    model.zero_grad()


def after_exceptions(here: Rank, schedules: Sequence[parity.Schedule], accumulation: str, lazy: bool) -> None:
    expected = list(parity.train(parity.build(FN, here, (2, 2), {}), FN, here.rank, STEPS))
    step = ACCUMULATION[accumulation]
    model = parity.build(FN, here, (2, 2), {})
    initial = [p.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    next(parity.train(model, FN, here.rank, [parity.PLAIN]))
    model.zero_grad()
    fresh = state_of(model)
    memories: list[Any] = []

    def remembered() -> Any:
        memories.append(PoisonedMemory())
        return memories[-1]

    options = replace(parity.LAZY if lazy else parity.EAGER, make_memory=remembered)
    for schedule, params in schedules:
        label = f"{schedule} {params}"
        attachment = commplan.attach(model, schedule, options=options, **params)
        for where in ("forward", "forward's end", "backward", "backward's end"):
            for place in places(model):
                for at in range(len(step)):
                    interrupted_step(model, here, place, where, step, at)
                    parity.restore(model, initial)
                    for number, grads in enumerate(parity.train(model, FN, here.rank, STEPS)):
                        parity.assert_equal(
                            grads, expected[number], f"{label}: {where} of {place}, microbatch {at}, step {number}"
                        )
                    assert memories[-1].live_bytes == 0, label
        interrupted_step(model, here, "b.1", "backward", step, len(step) - 1)
        attachment.detach()
        assert memories[-1].live_bytes == 0, label
        parity.set_flags(model, {})
        gc.collect()
        assert state_of(model) == fresh, label
        parity.restore(model, initial)
        for number, grads in enumerate(parity.train(model, FN, here.rank, STEPS)):
            parity.assert_equal(grads, expected[number], f"stock after {label}, step {number}")


@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_every_place_under_different_schedules(worlds: Worlds, accumulation: str) -> None:
    arguments = {"schedules": parity.DIFFERENT, "accumulation": accumulation, "lazy": False}
    worlds.of(4).run(after_exceptions, **arguments)


@pytest.mark.parametrize("accumulation", ["none", "both"])
def test_every_schedule_with_all_collectives_held_back(worlds: Worlds, accumulation: str) -> None:
    """Whatever can be pending is pending when the exception comes, and every buffer is destroyed when it is given back."""
    arguments = {"schedules": parity.SCHEDULES, "accumulation": accumulation, "lazy": True}
    worlds.of(4).run(after_exceptions, **arguments)


class HookError(Exception):
    """What a hook of the user's raises."""


def in_hooks(here: Rank) -> None:
    """A hook that runs after a gradient is accumulated raises, inside root or before."""
    for schedule, params in parity.SCHEDULES:
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
