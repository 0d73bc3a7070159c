"""What changes from step to step, and what users hook into."""

from __future__ import annotations

import pytest
import torch

import commplan
from tests.fsdp2 import test_values
from tests.worlds import models, parity, reference
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]


def frozen_on_odd_steps(here: Rank) -> None:
    for schedule, params in parity.LIBRARY:
        model = parity.build(FN, here, (2, 2), {})
        torch.manual_seed(0)
        plain = models.Net()
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for step in range(4):
                for net in (model, plain):
                    net.b[1].requires_grad_(step % 2 == 0)  # type: ignore[index]
                    net.zero_grad()
                test_values.one_backward(model, here.rank)
                for rank in range(here.size):
                    test_values.one_backward(plain, rank)
                right = {n: None if p.grad is None else p.grad / here.size for n, p in plain.named_parameters()}
                assert (right["b.1.linear.weight"] is None) == (step % 2 == 1)
                reference.assert_close(model, right)


@pytest.mark.report("pytorch#91167")
def test_frozen_on_odd_steps(worlds: Worlds) -> None:
    worlds.of(4).run(frozen_on_odd_steps)


def hooks_case(here: Rank) -> None:
    for schedule, params in parity.LIBRARY:
        model = models.shard(models.fk(3), here.mesh((2, 2)))
        seen: list[tuple[int, float]] = []
        for k, p in enumerate(model.parameters(), 1):
            p.register_post_accumulate_grad_hook(lambda p, k=k, seen=seen: seen.append((k, p.grad.to_local().max().item())))
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            test_values.fk_step(here, model, 2, all_reduce=False)
        assert sorted(seen) == [(1, 5.0), (2, 10.0), (3, 15.0)], schedule


@pytest.mark.report("pytorch#129450")
def test_post_accumulate_grad_hooks_see_the_reduced_gradient_once(worlds: Worlds) -> None:
    worlds.of(4).run(hooks_case)
