"""Every public setting of FSDP2: honoured under a schedule as in stock FSDP2, or refused with its name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import commplan
from tests.models.comparing import LATE, WORKERS, Case, compare, local, on_input, seeded, spread, train
from tests.worlds import features, models, parity
from tests.worlds.world import Rank, Worlds


class Shift(nn.Module):
    """Backward does not need its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Switched(nn.Module):
    """Runs one of two Linear, on all ranks the same one; both are in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return torch.tanh((self.one if self.turn % 2 else self.other)(x))


def net() -> nn.Module:
    model = models.Net()
    model.b.extend([Shift(), Switched()])
    model.path = (3, 0, 1, 4, 2)
    return model


# Since torch 2.13 the older names warn.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Gathers:
    """An all-gather of the user's own."""

    num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> dist.Work | None:
        Gathers.num_calls += 1
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatters(Gathers):
    """A reduce-scatter of the user's own."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> dist.Work:
        return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def each_unit(model: Any, name: str, *args: Any) -> None:
    """Setters that do not recurse."""
    for module in (*model.b, model):
        getattr(module, name)(*args)


def old_factor(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each_unit(model, "set_reduce_scatter_divide_factor", 8.0)


def factor(model: Any) -> None:
    """gloo can't divide by a factor in the reduction, so sums are forced with it."""
    each_unit(model, "set_gradient_divide_factor", 8.0)
    each_unit(model, "set_force_sum_reduction_for_comms", True)


@dataclass(frozen=True)
class Setting:
    """One public method of FSDPModule.

    Attributes:
        apply: calls it.
        refusal: what the message says besides the module, if a schedule can't honour it.
        undo: takes it back, so that training can go on.
    """

    apply: Callable[[Any], Any]
    refusal: str = ""
    undo: Callable[[Any], Any] = lambda model: None


SETTINGS: dict[str, Setting] = {
    "reset_iter_state": Setting(lambda m: m.reset_iter_state() if m._get_fsdp_state()._is_root else None),
    "reshard": Setting(lambda m: each_unit(m, "reshard")),
    "unshard": Setting(lambda m: (m.b[1].unshard(), m.b[2].unshard(async_op=True), m.b[0].unshard(async_op=True).wait())),
    "set_all_reduce_hook": Setting(
        lambda m: m.b[1].set_all_reduce_hook(lambda shard: None),
        "set_all_reduce_hook",
        lambda m: m.b[1].set_all_reduce_hook(None),
    ),
    "set_allocate_memory_from_process_group_for_comm": Setting(
        lambda m: m.b[1].set_allocate_memory_from_process_group_for_comm(True),
        "ProcessGroupAllocReduceScatter",
        lambda m: m.b[1].set_allocate_memory_from_process_group_for_comm(False),
    ),
    "set_custom_all_gather": Setting(lambda m: each_unit(m, "set_custom_all_gather", Gathers())),
    "set_custom_reduce_scatter": Setting(
        lambda m: m.b[1].set_custom_reduce_scatter(Scatters()),
        "Scatters",
        lambda m: m.b[1].set_custom_reduce_scatter(type(m.b[0]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm)()),
    ),
    "set_force_sum_reduction_for_comms": Setting(lambda m: each_unit(m, "set_force_sum_reduction_for_comms", True)),
    "set_gradient_divide_factor": Setting(factor),
    "set_is_last_backward": Setting(lambda m: m.set_is_last_backward(False)),
    "set_modules_to_backward_prefetch": Setting(
        lambda m: (m.set_modules_to_backward_prefetch([m.b[2], m.b[4]]), m.b[2].set_modules_to_backward_prefetch([m.b[0]]))
    ),
    "set_modules_to_forward_prefetch": Setting(
        lambda m: (m.set_modules_to_forward_prefetch([m.b[3], m.b[0]]), m.b[0].set_modules_to_forward_prefetch([m.b[4]]))
    ),
    "set_post_optim_event": Setting(lambda m: m.set_post_optim_event(torch.cpu.current_stream().record_event())),
    "set_reduce_scatter_divide_factor": Setting(
        lambda m: (old_factor(m), each_unit(m, "set_force_sum_reduction_for_comms", True))
    ),
    "set_reduce_scatter_max_input_buffers": Setting(lambda m: m.set_reduce_scatter_max_input_buffers(3)),
    "set_reduce_scatter_unused_params": Setting(lambda m: m.set_reduce_scatter_unused_params(True)),
    "set_requires_all_reduce": Setting(lambda m: m.b[1].set_requires_all_reduce(False)),
    "set_requires_gradient_sync": Setting(lambda m: m.b[2].set_requires_gradient_sync(False)),
    "set_reshard_after_backward": Setting(lambda m: m.set_reshard_after_backward(False)),
    "set_reshard_after_forward": Setting(
        lambda m: (m.set_reshard_after_forward(True), m.b[0].set_reshard_after_forward(False))
    ),
    "set_separate_reduce_scatter_group": Setting(lambda m: m.set_separate_reduce_scatter_group()),
    "set_symm_mem_for_comm": Setting(lambda m: m),
    "set_unshard_in_backward": Setting(lambda m: m.b[3].set_unshard_in_backward(False)),
}

CPU_CANT = {"set_symm_mem_for_comm"}
"""Settings that stock FSDP2 can't have without a GPU."""

HONOURED = [n for n, s in SETTINGS.items() if not s.refusal and n not in CPU_CANT and hasattr(FSDPModule, n)]
REFUSED = [n for n, s in SETTINGS.items() if s.refusal and hasattr(FSDPModule, n)]


def test_every_public_method_is_known() -> None:
    """A new release of torch may bring another: find out what a schedule makes of it."""
    assert {name for name in vars(FSDPModule) if not name.startswith("_")} <= SETTINGS.keys()


def honoured(here: Rank, name: str) -> None:
    """Set before attach, and after it between two steps."""
    setting = SETTINGS[name]

    def before(model: nn.Module, here: Rank) -> nn.Module:
        model = models.shard(model, here.mesh((2, 2)))
        setting.apply(model)
        return model

    def later(model: nn.Module, rank: int, number: int) -> torch.Tensor:
        if number == 1:
            setting.apply(model)
        return on_input(model, rank, number)

    compare(here, Case(net, on_input, before, has_reference=False), spread(name)[1:])
    compare(here, Case(net, later, has_reference=False), [WORKERS])


@pytest.mark.parametrize("name", HONOURED)
def test_honoured(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(honoured, name=name)


def refused(here: Rank, name: str) -> list[str]:
    """At attach; and in the next backward, where it was set after attach. Without it training goes on."""
    setting = SETTINGS[name]
    case = Case(net, on_input)
    expected = list(train(case, case.fresh(here), here))
    model = case.fresh(here)
    setting.apply(model)
    with pytest.raises(commplan.CommplanError) as at_attach:
        commplan.attach(model, "pipelined_allreduce")
    setting.undo(model)
    steps = train(case, model, here)
    with commplan.attach(model, "pipelined_allreduce"):
        for number, stock in enumerate(expected[:2]):
            parity.assert_equal(next(steps), stock, str(number))
        setting.apply(model)
        with pytest.raises((commplan.CommplanError, commplan.ExecutionError)) as in_backward:
            next(steps)
    return [str(at_attach.value), str(in_backward.value)]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(worlds: Worlds, name: str) -> None:
    for messages in worlds.of(4).run(refused, name=name):
        for message in messages:
            assert re.search(f"module 'b.1' .*{SETTINGS[name].refusal}", message), message


def every_all_gather(here: Rank) -> int:
    model = models.shard(net(), here.mesh((2, 2)))
    SETTINGS["set_custom_all_gather"].apply(model)
    with commplan.attach(model, "pipelined_allreduce"):
        before = Gathers.num_calls
        on_input(model, here.rank, 0)
        return Gathers.num_calls - before


def test_custom_all_gathers_are_called(worlds: Worlds) -> None:
    """Six units in forward, and in backward again, but for the root, which stays whole."""
    assert worlds.of(4).run(every_all_gather) == [11] * 4


def resets(here: Rank, flag: str) -> None:
    """What was accumulated before `reset_iter_state` is gone, in whichever way it was kept."""
    case = Case(models.Net, on_input)
    right = case.fresh(here)
    on_input(right, here.rank, 1)
    for schedule, params, options in (WORKERS, *LATE[:1]):
        model = case.fresh(here)
        with commplan.attach(model, schedule, options=options, **params):
            parity.set_flags(model, {flag: False})
            on_input(model, here.rank, 0)
            model.reset_iter_state()
            parity.set_flags(model, {})
            on_input(model, here.rank, 1)
            for mine, stock in zip(model.parameters(), right.parameters(), strict=True):
                assert torch.equal(local(mine.grad), local(stock.grad)), schedule


@features.reset_of_iterations
@pytest.mark.parametrize("flag", ["all_reduce", "sync"])
def test_reset_iter_state_drops_what_was_accumulated(worlds: Worlds, flag: str) -> None:
    worlds.of(4).run(resets, flag=flag)


def whole_until_told(here: Rank) -> list[bool]:
    """`set_reshard_after_backward(False)`, `unshard` and `reshard` between forward and backward."""
    model = models.shard(net(), here.mesh((2, 2)))
    found = []
    with commplan.attach(model, "pipelined_allreduce", options=parity.LAZY):
        model.set_reshard_after_backward(False)
        on_input(model, here.rank, 0)
        found.append(hasattr(model.b[0].linear.weight, "to_local"))
        loss = model(seeded(here.rank, 1, 3, 4).requires_grad_()).sum()
        for block in model.b:
            block.reshard()
        found.append(hasattr(model.b[0].linear.weight, "to_local"))
        model.b[0].unshard()
        found.append(hasattr(model.b[0].linear.weight, "to_local"))
        model.set_reshard_after_backward(True)
        loss.backward()
        found.append(hasattr(model.b[0].linear.weight, "to_local"))
    return found


def test_resharding_follows_the_settings(worlds: Worlds) -> None:
    assert worlds.of(4).run(whole_until_told) == [[False, True, False, True]] * 4
