"""Models made on the meta device, parameters kept on the CPU, parameters that change after attach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

import commplan
from tests.models.comparing import Case, compare, on_input, seeded, spread, train
from tests.worlds import models, parity
from tests.worlds.world import Rank, Worlds


def on_meta(here: Rank) -> nn.Module:
    with torch.device("meta"):
        model = models.Net()
    return models.shard(model, here.mesh((2, 2)))


def materialise(model: nn.Module) -> nn.Module:
    """Memory, then values, as a training script does; equal on all ranks."""
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            whole = torch.randn(p.shape) / 2
            p.to_local().copy_(distribute_tensor(whole, p.device_mesh, p.placements).to_local())
    return model


META = Case(models.Net, on_input, lambda _, here: materialise(on_meta(here)), has_reference=False)


def attached_then_initialised(here: Rank, name: str) -> None:
    """Attach sees meta parameters; memory comes later."""
    give_memory = MEMORY[name]
    expected = list(train(META, META.fresh(here), here))
    for schedule, params, options in spread(name):
        model = on_meta(here)
        with commplan.attach(model, schedule, options=options, **params):
            for number, (mine, stock) in enumerate(zip(train(META, give_memory(model), here), expected, strict=True)):
                parity.assert_equal(mine, stock, f"{schedule}, step {number // 2}")


def by_state_dict(model: nn.Module) -> nn.Module:
    """New parameters take the place of the meta ones."""
    source = materialise(models.shard(models.Net(), next(model.parameters()).device_mesh))
    model.load_state_dict(source.state_dict(), assign=True)
    return model


MEMORY: dict[str, Callable[[nn.Module], nn.Module]] = {"to_empty": materialise, "assign": by_state_dict}


@pytest.mark.parametrize("name", MEMORY)
def test_attach_before_memory_is_there(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(attached_then_initialised, name=name)


def offloaded(model: nn.Module, here: Rank, *, bf16: bool = False) -> nn.Module:
    precision = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if bf16 else {}
    return models.shard(model, here.mesh((2, 2)), offload_policy=CPUOffloadPolicy(pin_memory=False), **precision)


def in_double(model: nn.Module, here: Rank) -> nn.Module:
    """The parameters' dtype changes after fully_shard, before the first forward."""
    return models.shard(model, here.mesh((2, 2))).double()


def on_double(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    loss = model(seeded(rank, number, 3, 4).double()).pow(2).sum()
    loss.backward()
    return loss


def low_precision(model: nn.Module, here: Rank) -> nn.Module:
    """Parameters are stored in bf16; gradients are reduced in it."""
    return models.shard(model.bfloat16(), here.mesh((2, 2)))


def on_bf16(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    loss = model(seeded(rank, number, 3, 4).bfloat16()).pow(2).sum()
    loss.backward()
    return loss


CASES = {
    "meta device": META,
    "CPU offload": Case(models.Net, on_input, offloaded),
    "CPU offload, bf16": Case(models.Net, on_input, partial(offloaded, bf16=True), has_reference=False),
    "double after fully_shard": Case(models.Net, on_double, in_double, has_reference=False),
    "bf16 parameters": Case(models.Net, on_bf16, low_precision, has_reference=False),
}


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.parametrize("name", CASES)
def test_initialisation(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)


def dtype_after_attach(here: Rank) -> str:
    """FSDP2 takes dtypes as they are at the first forward, a plan as they are at attach."""
    model = models.shard(models.Net(), here.mesh((2, 2)))
    with commplan.attach(model, "pipelined_allreduce"):
        model.double()
        with pytest.raises(commplan.CommplanError) as caught:
            model(seeded(here.rank, 0, 3, 4).double())
    case = CASES["double after fully_shard"]
    expected = list(train(case, case.fresh(here), here))
    for number, (mine, stock) in enumerate(zip(train(case, restored(model), here), expected, strict=True)):
        parity.assert_equal(mine, stock, f"after detach, step {number // 2}")
    return str(caught.value)


def restored(model: nn.Module) -> nn.Module:
    """The values that `Case.fresh` begins with."""
    torch.manual_seed(0)
    whole = models.Net().double()
    with torch.no_grad():
        for p, value in zip(model.parameters(), whole.parameters(), strict=True):
            p.to_local().copy_(distribute_tensor(value, p.device_mesh, p.placements).to_local())
    return model


def test_dtype_changed_after_attach(worlds: Worlds) -> None:
    for message in worlds.of(4).run(dtype_after_attach):
        assert "is in torch.float64 now and was in torch.float32" in message
        assert "detach" in message
