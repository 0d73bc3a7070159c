"""Which ranks a parameter lives on: several meshes in one model, slices of larger meshes, axes of any name and order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commplan
from tests.models.comparing import Case, accumulated, compare, mesh_of, on_input, on_plain_input, spread, train
from tests.worlds import features, models, parity, reference
from tests.worlds.world import Rank, Worlds


def mixed(model: nn.Module, here: Rank) -> nn.Module:
    """Sharded over all, two replicas of two, whole on every rank, and a root like the second."""
    fully_shard(model.b[0], mesh=here.mesh((4,), ("shard",)))
    fully_shard(model.b[1], mesh=here.mesh((2, 2)))
    replicate(model.b[2], mesh=here.mesh((4,), ("replicate",)))
    return fully_shard(model, mesh=here.mesh((2, 2)))


def all_replicated(model: nn.Module, here: Rank) -> nn.Module:
    mesh = here.mesh((4,), ("replicate",))
    for block in model.b:
        replicate(block, mesh=mesh)
    return replicate(model, mesh=mesh)


class Experts(nn.Module):
    """A block of which one part lives on another mesh than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(4, 4, 4) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("bi,eij->bj", torch.tanh(self.dense(x)), self.experts)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = block(x)
        return self.head(x)


def several_groups(model: nn.Module, here: Rank) -> nn.Module:
    """Two parameter groups in each block, on two meshes."""
    dense = _fsdp_common.HSDPMeshInfo(here.mesh((2, 2)), shard_mesh_dim=1, replicate_mesh_dim=0)
    experts = _fsdp_common.FSDPMeshInfo(here.mesh((4,), ("shard",)), shard_mesh_dim=0)
    for block in model.b:
        mesh_of = {id(block.experts): experts}
        place = lambda p, mesh_of=mesh_of: _fsdp_common.ShardPlacementResult(Shard(0), mesh_of.get(id(p), dense))  # noqa: E731
        fully_shard(block, mesh=here.mesh((2, 2)), shard_placement_fn=place)
    return fully_shard(model, mesh=here.mesh((2, 2)))


def swapped_ranks(model: nn.Module, here: Rank) -> nn.Module:
    """Ranks 0 and 2 are one replica, 1 and 3 the other."""
    return models.shard(model, mesh_of(((0, 2), (1, 3)), ("replicate", "shard")))


def swapped_names(model: nn.Module, here: Rank) -> nn.Module:
    """What FSDP2 shards over is the last axis, whatever it is called."""
    return models.shard(model, here.mesh((2, 2), ("shard", "replicate")))


def unnamed(model: nn.Module, here: Rank) -> nn.Module:
    """FSDP2 asks for names where there are two axes."""
    return models.shard(model, mesh_of((0, 1, 2, 3), None))


def slice_of(shape: tuple[int, ...], names: tuple[str, ...], axes: tuple[str, ...]) -> Callable[..., nn.Module]:
    """Shards on a part of a larger mesh."""
    return lambda model, here: models.shard(model, here.mesh(shape, names)[axes])


CASES = {
    "1-D, 2-D and replicated": Case(models.Net, on_input, mixed),
    "1-D, 2-D and replicated, plain input": Case(models.Net, on_plain_input, mixed),
    "1-D, 2-D and replicated, accumulated": Case(models.Net, accumulated, mixed, tolerance=3e-6),
    "replicated": Case(models.Net, on_input, all_replicated),
    "replicated, accumulated": Case(models.Net, accumulated, all_replicated, tolerance=3e-6),
    "several groups": Case(Moe, on_input, several_groups, tolerance=3e-6),
    "several groups, plain input": Case(Moe, on_plain_input, several_groups, tolerance=3e-6),
    "swapped ranks": Case(models.Net, on_input, swapped_ranks),
    "swapped names": Case(models.Net, on_input, swapped_names),
    "unnamed axis": Case(models.Net, on_input, unnamed),
    "slice of three axes": Case(models.Net, on_input, slice_of((2, 2, 1), ("dp", "fsdp", "tp"), ("dp", "fsdp"))),
    "slice beside a pipeline of one": Case(models.Net, on_input, slice_of((1, 2, 2), ("pp", "dp", "fsdp"), ("dp", "fsdp"))),
}


def tensor_parallel(model: nn.Module, here: Rank) -> nn.Module:
    """Each MLP is split over pairs of ranks, then sharded, or replicated, over the two pairs."""
    mesh = here.mesh((1, 2, 2), ("replicate", "shard", "tp"))
    for block in model.b:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["replicate", "shard"])
    return fully_shard(model, mesh=mesh["replicate", "shard"])


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(Mlp() for _ in range(3))
        self.placement: tuple[DeviceMesh, tuple[Placement, ...]] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.placement is not None:
            x = DTensor.from_local(x, *self.placement)
        for block in self.b:
            x = block(x)
        return x.to_local() if isinstance(x, DTensor) else x


def spmd(model: nn.Module, here: Rank) -> nn.Module:
    """Parameters are distributed tensors on the whole mesh before FSDP2 shards them over some of its axes."""
    mesh = here.mesh((2, 2, 1), ("dp", "fsdp", "tp"))
    distribute_module(model, mesh)
    model.placement = (mesh, (Shard(0), Shard(0), Replicate()))
    axes = fsdp.DataParallelMeshDims(shard="fsdp", replicate="dp")
    for block in model.b:
        fully_shard(block, mesh=mesh, dp_mesh_dims=axes)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=axes)


def same_on_both(model: nn.Module, rank: int, number: int) -> None:
    """The ranks of one tensor-parallel pair see the same data."""
    on_input(model, rank // 2, number)


CASES["SPMD"] = Case(Mlps, on_input, spmd, tolerance=3e-6)
CASES["tensor parallel"] = Case(Mlps, same_on_both, tensor_parallel, tolerance=3e-6)

NEEDS = {
    "several groups": features.groups_over_several_meshes,
    "several groups, plain input": features.groups_over_several_meshes,
    "SPMD": features.axes_of_one_mesh,
}


def run(here: Rank, name: str) -> None:
    compare(here, CASES[name], spread(name))


@pytest.mark.report("several meshes and clipping", "swapped axes")
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in CASES])
def test_meshes(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(run, name=name)


def stages(here: Rank) -> None:
    """Two stages of a pipeline, of other models, each sharded over two ranks and driven by another schedule."""
    stage = here.rank // 2
    mesh = here.mesh((2, 2), ("pp", "shard"))["shard"]
    made = Case(models.Net if stage else Mlps, on_input, lambda model, _: models.shard(model, mesh))
    expected = list(train(made, made.fresh(here), here))
    model = made.fresh(here)
    with commplan.attach(model, "fsdp2_native" if stage else "windowed_allreduce", options=parity.LAZY):
        for number, (mine, stock) in enumerate(zip(train(made, model, here), expected, strict=True)):
            parity.assert_equal(mine, stock, f"stage {stage}, {number}")


def test_stages_of_a_pipeline(worlds: Worlds) -> None:
    worlds.of(4).run(stages)


def norms(here: Rank) -> None:
    """Clipping takes one mesh at a time, in stock FSDP2 as under a schedule; the parts make up the unsharded norm."""
    torch.manual_seed(0)
    plain = models.Net()
    for rank in range(here.size):
        on_input(plain, rank, 0)
    for p in plain.parameters():
        p.grad /= here.size
    right = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    model = CASES["1-D, 2-D and replicated"].fresh(here)
    with commplan.attach(model, "pipelined_allreduce", options=parity.LAZY):
        on_input(model, here.rank, 0)
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for p in model.parameters():
        by_mesh.setdefault(p.device_mesh, []).append(p)
    parts = [torch.nn.utils.get_total_norm([p.grad for p in of_mesh]).full_tensor() for of_mesh in by_mesh.values()]
    assert len(parts) == 3
    total = torch.stack(parts).norm()
    assert abs(total - right) <= reference.TOLERANCE * right
    for of_mesh in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(of_mesh, 1.0, total)
    torch.nn.utils.clip_grads_with_norm_(plain.parameters(), 1.0, right)
    reference.assert_close(model, {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.report("several meshes and clipping")
def test_clipping_over_several_meshes(worlds: Worlds) -> None:
    worlds.of(4).run(norms)
