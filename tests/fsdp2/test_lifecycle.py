"""Attach and detach leave nothing behind; plans follow the order in which modules run."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commplan
from commplan.fsdp2 import torch_private
from tests.worlds import models, parity
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]
STEPS = [parity.PLAIN, parity.NO_ALL_REDUCE]


def traces(model: nn.Module) -> list[Any]:
    """Names of everything on the model, hooks, process groups, and our threads."""
    found: list[Any] = [len(dist.distributed_c10d._world.pg_map)]
    found.append(sorted(t.name for t in threading.enumerate() if t.name.startswith("commplan")))
    for name, module in model.named_modules():
        found.append((name, len(module._forward_pre_hooks), len(module._forward_hooks), sorted(vars(module))))
    for _, state in torch_private.states(model):
        found.extend(sorted(vars(owner)) for owner in (state, *torch_private.groups(state)))
    return found


def detach_restores(here: Rank) -> None:
    expected = list(parity.train(parity.build(FN, here, (2, 2), {}), FN, here.rank, STEPS * 3))
    model = parity.build(FN, here, (2, 2), {})
    model(FN.batch(here.rank, 0))
    before = traces(model)
    names = list(model.state_dict())
    steps = parity.train(model, FN, here.rank, STEPS * 3)
    for number in range(len(expected)):
        attachment = commplan.attach(model, "eager_apply") if number % 3 else None
        assert list(model.state_dict()) == names
        parity.assert_equal(next(steps), expected[number], f"step {number}")
        if attachment is not None:
            attachment.detach()
            attachment.detach()
        assert traces(model) == before


def test_stock_and_schedule_by_turns(worlds: Worlds) -> None:
    worlds.of(4).run(detach_restores)


def two_models(here: Rank) -> None:
    """Two attachments at once, their steps interleaved."""
    expected = list(parity.train(parity.build(FN, here, (2, 2), {}), FN, here.rank, STEPS))
    one, other = (parity.build(FN, here, (2, 2), {}) for _ in range(2))
    with commplan.attach(one, "pipelined_allreduce") as first, commplan.attach(other, "single_lane") as second:
        both = zip(parity.train(one, FN, here.rank, STEPS), parity.train(other, FN, here.rank, STEPS), strict=True)
        for number, (mine, theirs) in enumerate(both):
            parity.assert_equal(mine, expected[number], "first")
            parity.assert_equal(theirs, expected[number], "second")
        assert first.plan.schedule != second.plan.schedule


def test_two_models_at_once(worlds: Worlds) -> None:
    worlds.of(4).run(two_models)


def leaves_by_exception(here: Rank) -> None:
    model = parity.build(FN, here, (2, 2), {})
    before = traces(model)
    try:
        with commplan.attach(model, "blocking"):
            raise KeyError
    except KeyError:
        pass
    assert traces(model) == before


def test_the_context_manager_detaches_on_an_exception(worlds: Worlds) -> None:
    worlds.of(4).run(leaves_by_exception)


def dropped(here: Rank) -> tuple[list[str], list[str]]:
    """Threads of a model that has a schedule, and which of them are there some time after nobody refers to it any more."""
    others = threading.enumerate()

    def ours() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread not in others)

    model = parity.build(FN, here, (2, 2), {})
    attachment = commplan.attach(model, "overlapped_allreduce")
    for _ in parity.train(model, FN, here.rank, STEPS):
        pass
    before = ours()
    executor = weakref.ref(attachment._driver.executor)
    del model, attachment
    gc.collect()
    assert executor() is None
    deadline_s = time.monotonic() + 30
    while ours() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return before, ours()


def test_a_model_that_is_dropped_takes_its_threads_with_it(worlds: Worlds) -> None:
    for before, after in worlds.of(4).run(dropped):
        assert {"commplan-control", "commplan-lookout"} < set(before)
        assert after == []


def many_modules_on_a_mesh(here: Rank) -> None:
    """Who is in a mesh is asked once for each that differs, though FSDP2 makes one for each module that is given none."""
    model = models.fk(6)
    line = here.mesh((4,), ("shard",))
    for number, block in enumerate(model.children()):
        fully_shard(block, mesh=copy.copy(line) if number else here.mesh((2, 2)))
    fully_shard(model, mesh=line)
    asking = patch.object(torch_private, "mesh_ranks", wraps=torch_private.mesh_ranks)
    with asking as asked, commplan.attach(model, "overlapped_allreduce") as attachment:
        modules = attachment.plan.modules.modules
    assert asked.call_count == 2
    named = [m.group for m in modules]
    assert named[:5] == named[:1] * 5
    assert named[5] != named[0]


def test_many_modules_on_a_mesh(worlds: Worlds) -> None:
    worlds.of(4).run(many_modules_on_a_mesh)


def many_times(here: Rank) -> None:
    model = models.shard(models.fk(2), here.mesh((2, 2)))
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    before = traces(model)
    for _ in range(15):
        model.zero_grad()
        with commplan.attach(model, "overlapped_allreduce"):
            ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
        assert [p.grad.to_local().max().item() for p in model.parameters()] == [2.5, 5.0]  # type: ignore[union-attr]
    assert traces(model) == before


def test_many_times(worlds: Worlds) -> None:
    worlds.of(4).run(many_times)


def gathered(here: Rank) -> None:
    """The root stays gathered after a forward without backward."""

    def steps(model: nn.Module) -> Iterator[dict[str, torch.Tensor | None]]:
        with torch.no_grad():
            model(FN.batch(here.rank, 0))
        yield {}
        yield from parity.train(model, FN, here.rank, STEPS)

    stock = steps(parity.build(FN, here, (2, 2), {}))
    model = parity.build(FN, here, (2, 2), {})
    mine = steps(model)
    next(mine), next(stock)
    with commplan.attach(model, "pipelined_allreduce"):
        for number, (one, other) in enumerate(zip(mine, stock, strict=True)):
            parity.assert_equal(one, other, f"step {number}")


def test_attach_while_the_root_is_gathered(worlds: Worlds) -> None:
    worlds.of(4).run(gathered)


# Orders.


def plan_order(here: Rank, name: str) -> tuple[list[str], list[str], str]:
    problem = parity.PROBLEMS[name]
    model = parity.build(problem, here, (2, 2), {})
    with commplan.attach(model, "pipelined_allreduce") as attachment:
        guessed = [m.name for m in attachment.plan.modules.modules]
        for i in range(2):
            problem.loss(model(problem.batch(here.rank, i)), here.rank).backward()
        return guessed, [m.name for m in attachment.plan.modules.modules], attachment.plan.digest


@pytest.mark.report("another order of backward than the plan's")
def test_the_plan_follows_the_order_of_forward(worlds: Worlds) -> None:
    found = worlds.of(4).run(plan_order, name="FN reversed")
    guessed, used, _ = found[0]
    assert guessed == ["b.2", "b.1", "b.0", "(root)"]
    assert used == ["b.0", "b.1", "b.2", "(root)"]
    assert all(of_rank == found[0] for of_rank in found)


def test_a_right_guess_is_kept(worlds: Worlds) -> None:
    for guessed, used, _ in worlds.of(4).run(plan_order, name="FN"):
        assert guessed == used


def evaluates_between(here: Rank) -> None:
    """Forwards without grad before a step, in another order, change neither the plan nor its gradients."""

    def steps(model: nn.Module) -> list[dict[str, torch.Tensor | None]]:
        found = []
        for i in range(3):
            model.path = (2, 0)
            with torch.no_grad():
                model(FN.batch(here.rank, 9))
            model.path = (0, 1, 2)
            FN.loss(model(FN.batch(here.rank, i)), here.rank).backward()
            found.append(parity.local_grads(model))
            model.zero_grad()
        return found

    expected = steps(parity.build(FN, here, (2, 2), {}))
    model = parity.build(FN, here, (2, 2), {})
    with commplan.attach(model, "pipelined_allreduce") as attachment:
        digest = attachment.plan.digest
        for number, (mine, stock) in enumerate(zip(steps(model), expected, strict=True)):
            parity.assert_equal(mine, stock, f"step {number}")
        assert attachment.plan.digest == digest


def test_evaluation_between_steps(worlds: Worlds) -> None:
    worlds.of(4).run(evaluates_between)


def changing_paths(here: Rank) -> None:
    """Another order, or other blocks, in each step."""
    paths = [(0, 1, 2), (2, 0, 1), (1,), (0, 2), (1, 1, 0), (0, 1, 2)]
    grads = []
    for schedule in (None, "pipelined_allreduce", "windowed_allreduce", "blocking"):
        model = parity.build(FN, here, (2, 2), {})
        attachment = commplan.attach(model, schedule, options=parity.LAZY) if schedule else None
        found = []
        for i, path in enumerate(paths):
            model.path = path
            FN.loss(model(FN.batch(here.rank, i)), here.rank).backward()
            found.append(parity.local_grads(model))
            model.zero_grad()
        if attachment is not None:
            attachment.detach()
        grads.append(found)
    for other in grads[1:]:
        for number, (mine, stock) in enumerate(zip(other, grads[0], strict=True)):
            parity.assert_equal(mine, stock, f"path {paths[number]}")


@pytest.mark.report("another order of backward than the plan's")
def test_paths_that_change_from_step_to_step(worlds: Worlds) -> None:
    worlds.of(4).run(changing_paths)
