"""Steps after backwards that did not end, second backwards without a forward, parameters that were exchanged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

import commplan
from commplan.errors import AttachError, ExecutionError
from commplan.fsdp2 import torch_faults, torch_private
from tests.faults.test_exceptions import Boom, BoomError, exploding
from tests.worlds import models, parity, reference
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]
RIGHT = [2.5, 5.0, 7.5]


def fk(here: Rank) -> Any:
    return models.shard(models.fk(3), here.mesh((2, 2)))


def loss_of(model: nn.Module, here: Rank) -> torch.Tensor:
    return ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum()


def clean_step(model: nn.Module, here: Rank, zero_grad: Callable[[], None]) -> None:
    zero_grad()
    loss_of(model, here).backward()
    assert reference.values(model) == RIGHT


def steps_after_an_exception(here: Rank, schedule: str, set_to_none: bool) -> str:
    """The optimizer refuses until the next backward; another model's optimizer does not care."""
    model, other = fk(here), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with commplan.attach(model, schedule):
        loss_of(model, here).backward()
        optimizer.step()
        mine = list(model.parameters())
        before = [p.to_local().clone() for p in mine]
        with exploding(model[0], "backward"), pytest.raises(BoomError):
            loss_of(model, here).backward()
        with pytest.raises(ExecutionError) as caught:
            optimizer.step()
        other(torch.ones(2)).sum().backward()
        torch.optim.AdamW(other.parameters()).step()
        assert all(torch.equal(p.to_local(), b) for p, b in zip(mine, before, strict=True))
        clean_step(model, here, lambda: optimizer.zero_grad(set_to_none=set_to_none))
        optimizer.step()
        assert not any(torch.equal(p.to_local(), b) for p, b in zip(mine, before, strict=True))
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("schedule", ["pipelined_allreduce", "eager_apply"])
def test_a_step_after_an_exception(worlds: Worlds, schedule: str, set_to_none: bool) -> None:
    for message in worlds.of(4).run(steps_after_an_exception, schedule=schedule, set_to_none=set_to_none):
        assert "apply_1" in message
        assert "call zero_grad of the optimizer" in message


def forgets_zero_grad(here: Rank) -> str:
    """Some gradients were applied before the exception: to go on would add to them."""
    model = fk(here)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commplan.attach(model, "eager_apply"):
        loss_of(model, here).backward()
        with exploding(model[0], "backward"), pytest.raises(BoomError):
            loss_of(model, here).backward()
        with torch.no_grad():
            model(torch.zeros(1))
        with pytest.raises(ExecutionError) as caught:
            loss_of(model, here)
        with pytest.raises(ExecutionError, match="zero_grad"):
            optimizer.step()
        clean_step(model, here, model.zero_grad)
        optimizer.step()
    return str(caught.value)


def test_going_on_without_zero_grad_is_refused(worlds: Worlds) -> None:
    for message in worlds.of(4).run(forgets_zero_grad):
        assert ".grad still holds gradients" in message
        assert "a backward raised with" in message


def root_never_runs(here: Rank) -> list[str]:
    """As with an engine of one's own: hooks of modules run, FSDP2's final callback does not."""
    said = []
    for comes_next in ("step", "forward"):
        model = fk(here)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with commplan.attach(model, "pipelined_allreduce"):
            loss = loss_of(model, here)
            for _, state in torch_private.states(model):
                vars(state)[torch_faults.QUEUES_CALLBACK] = lambda: None
            loss.backward()
            for _, state in torch_private.states(model):
                del vars(state)[torch_faults.QUEUES_CALLBACK]
            with pytest.raises(ExecutionError) as caught:
                optimizer.step() if comes_next == "step" else model(torch.zeros(1, requires_grad=True))
            said.append(str(caught.value))
    return said


@pytest.mark.report("pytorch#144535")
def test_a_backward_whose_root_never_ran(worlds: Worlds) -> None:
    for at_step, at_forward in worlds.of(4).run(root_never_runs):
        assert "optimizer.step() after a backward that did not end" in at_step
        assert "a backward ended without its root" in at_forward
        for message in (at_step, at_forward):
            assert "apply_0" in message
            assert "AR_" in message


def second_backward(here: Rank, before_any_module: bool) -> str:
    """Two forwards, then two backwards, of which the first raises."""
    model = fk(here)
    with commplan.attach(model, "pipelined_allreduce"):
        if before_any_module:
            first = Boom.apply(loss_of(model, here))
        else:
            with exploding(model[1], "backward"):
                first = loss_of(model, here)
        second = loss_of(model, here)
        with pytest.raises(BoomError):
            first.backward()
        said = ""
        if not before_any_module:
            with pytest.raises(ExecutionError) as caught:
                second.backward()
            said = str(caught.value)
        else:
            # FSDP2 did not hear of the first one.
            second.backward()
            assert reference.values(model) == RIGHT
        clean_step(model, here, model.zero_grad)
    return said


@pytest.mark.parametrize("before_any_module", [False, True])
def test_a_second_backward_after_one_that_raised(worlds: Worlds, before_any_module: bool) -> None:
    for message in worlds.of(4).run(second_backward, before_any_module=before_any_module):
        if not before_any_module:
            assert "an earlier one raised with" in message
            assert "no forward came since" in message


class WarningsKept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def skips_a_microbatch(here: Rank) -> list[str]:
    """A forward that raises harms nothing that is reduced already: the step goes on without it, and without a word."""
    kept = WarningsKept()
    logging.getLogger("commplan").addHandler(kept)
    model = fk(here)
    with commplan.attach(model, "pipelined_allreduce"):
        loss_of(model, here).backward()
        with exploding(model[1], "forward"), pytest.raises(BoomError):
            loss_of(model, here)
        loss_of(model, here).backward()
        assert reference.values(model) == [5.0, 10.0, 15.0]
        assert kept.messages == []
        # What only accumulated is lost, and somebody has to know.
        parity.set_flags(model, {"all_reduce": False})
        model.zero_grad()
        loss_of(model, here).backward()
        with exploding(model[1], "forward"), pytest.raises(BoomError):
            loss_of(model, here)
        parity.set_flags(model, {})
        clean_step(model, here, model.zero_grad)
    logging.getLogger("commplan").removeHandler(kept)
    return kept.messages


def test_a_forward_that_raises_between_microbatches(worlds: Worlds) -> None:
    for messages in worlds.of(4).run(skips_a_microbatch):
        assert len(messages) == 1
        assert "what they accumulated is dropped" in messages[0]


def optimizer_in_backward(here: Rank) -> None:
    """Each parameter has an optimizer that steps when its gradient is there."""
    for rank_checks in ("backward", "always"):
        for schedule, params in parity.DISTINCT:
            model = fk(here)
            steps: Counter[str] = Counter()
            for name, parameter in model.named_parameters():
                own = torch.optim.SGD([parameter], lr=1.0)

                def step(p: torch.Tensor, own: Any = own, name: str = name, steps: Counter[str] = steps) -> None:
                    own.step()
                    own.zero_grad()
                    steps[name] += 1

                parameter.register_post_accumulate_grad_hook(step)
            with commplan.attach(model, schedule, rank_checks=rank_checks, **params):  # type: ignore[arg-type]
                for _ in range(2):
                    loss_of(model, here).backward()
            assert steps == {name: 2 for name, _ in model.named_parameters()}
            values = [p.to_local().unique().tolist() for p in model.parameters()]
            assert values == [[-5.0], [-10.0], [-15.0]], schedule


def test_optimizers_that_step_in_backward(worlds: Worlds) -> None:
    worlds.of(4).run(optimizer_in_backward)


def changed(here: Rank, change: str) -> str:
    model = parity.build(FN, here, (2, 2), {})
    with commplan.attach(model, "pipelined_allreduce"):
        FN.loss(model(FN.batch(here.rank, 0)), here.rank).backward()
        model.zero_grad()
        if change == "dtype":
            model.to(torch.bfloat16)
        elif change == "parameter":
            model.b[1].reshard()  # type: ignore[index]
            model.b[1].linear.weight = nn.Parameter(model.b[1].linear.weight.detach().clone())  # type: ignore[index]
        with pytest.raises(AttachError) as caught:
            model(FN.batch(here.rank, 0))
        with torch.no_grad():
            model.eval()
    return str(caught.value)


@pytest.mark.parametrize(("change", "words"), [("dtype", "is in torch.bfloat16 now"), ("parameter", "was replaced by another")])
def test_parameters_that_changed(worlds: Worlds, change: str, words: str) -> None:
    for message in worlds.of(4).run(changed, change=change):
        assert words in message
        assert "detach before" in message


def loads_by_assignment(here: Rank) -> None:
    """What FSDP2 takes in its stride, commplan does as well."""
    model = parity.build(FN, here, (2, 2), {})
    expected = list(parity.train(parity.build(FN, here, (2, 2), {}), FN, here.rank, [parity.PLAIN]))
    with commplan.attach(model, "pipelined_allreduce"):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        for grads in parity.train(model, FN, here.rank, [parity.PLAIN]):
            parity.assert_equal(grads, expected[0], "after load_state_dict(assign=True)")


def test_a_state_dict_that_is_assigned(worlds: Worlds) -> None:
    worlds.of(4).run(loads_by_assignment)


def other_backward(here: Rank) -> None:
    """A hook on all optimizers must neither keep a model alive nor outlive an attachment."""
    hooks = optimizers._global_optimizer_pre_hooks
    before = len(hooks)
    attachment = commplan.attach(fk(here), "blocking")
    assert len(hooks) == before + 1
    attachment.detach()
    assert len(hooks) == before


def test_the_optimizer_hook_goes_with_detach(worlds: Worlds) -> None:
    worlds.of(4).run(other_backward)
