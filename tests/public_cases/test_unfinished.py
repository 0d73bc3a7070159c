"""Backwards that never come to their end: the next step or forward raises, under every schedule."""

from __future__ import annotations

import pytest
import torch

import commplan
from commplan.errors import ExecutionError
from commplan.fsdp2 import torch_faults, torch_private
from tests.worlds import models, parity, reference
from tests.worlds.world import Rank, Worlds


def root_never_ran(here: Rank, comes_next: str) -> dict[str, tuple[str, list[str]]]:
    """As with an engine of one's own: hooks of modules run, FSDP2's final callback does not.

    Returns:
        schedule -> the message, and the modules whose gradients were not written.
    """
    said = {}
    for schedule, params in parity.LIBRARY:
        model = models.shard(models.fk(3), here.mesh((2, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            loss = ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum()
            for _, state in torch_private.states(model):
                vars(state)[torch_faults.QUEUES_CALLBACK] = lambda: None
            loss.backward()
            for _, state in torch_private.states(model):
                del vars(state)[torch_faults.QUEUES_CALLBACK]
            missing = [str(2 - i) for i, p in enumerate(model.parameters()) if p.grad is None]
            with pytest.raises(ExecutionError) as caught:
                optimizer.step() if comes_next == "step" else model(torch.zeros(1, requires_grad=True))
            said[schedule] = (str(caught.value), missing)
            optimizer.zero_grad()
            ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
            assert reference.values(model) == [2.5, 5.0, 7.5], schedule
    return said


@pytest.mark.report("pytorch#144535")
@pytest.mark.parametrize("comes_next", ["step", "forward"])
def test_root_never_ran(worlds: Worlds, comes_next: str) -> None:
    for of_rank in worlds.of(4).run(root_never_ran, comes_next=comes_next):
        for schedule, (message, missing) in of_rank.items():
            assert "did not end" in message or "ended without its root" in message, schedule
            for n in missing:
                assert f"apply_{n}" in message, schedule
