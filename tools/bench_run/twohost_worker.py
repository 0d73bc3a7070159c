"""One of four ranks on two hosts: `python -m bench_run.twohost_worker WORK.json RANK STORE RESULT.json`.

Everything that is compared is alive at once, and measured in turn. Rank 0 writes a JSON object a line to standard output
as it goes, and what all ranks saw to the result file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from demo_run.launch import leave_with_parent
from demo_run.model import Block
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import commplan
from bench_run import twohost_work as work_
from bench_run.emulated import SleepingLinear
from bench_run.twohost_measured import Alone, Backward, Measured, Reference, measure
from bench_run.twohost_work import Work, best_schedules
from commplan.errors import CommplanError

Tell = Callable[[dict[str, Any]], None]

# A transformer's block of 2.08 M parameters, and as many tokens as keep two cores busy for some 100 ms.
_REAL_DIM, _REAL_HEADS, _REAL_TOKENS = 416, 4, (4, 128)


def _build(work: Work, kind: str) -> nn.Sequential:
    if kind == work_.REAL:
        return nn.Sequential(*(Block(_REAL_DIM, _REAL_HEADS) for _ in range(work.num_modules)))
    return nn.Sequential(*(SleepingLinear(work.dim) for _ in range(work.num_modules)))


def _input(work: Work, setting: str, rank: int) -> torch.Tensor:
    shape = (*_REAL_TOKENS, _REAL_DIM) if setting == work_.REAL else (1, work.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def _sharded(work: Work, kind: str, mesh: DeviceMesh) -> Any:
    """A model whose weights are equal at every call. No rank ever holds a whole one: many models are alive at once."""
    with torch.device("meta"):
        model = _build(work, kind)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(mesh.get_local_rank("shard"))
    with torch.no_grad():
        for parameter in model.parameters():
            # Uniform, of the width of a linear layer's.
            width = parameter.shape[-1] ** -0.5
            parameter.to_local().uniform_(-width, width, generator=generator)
    return model


class _Field:
    """All that is compared on one kind of model; `attachments` ends them."""

    def __init__(self, work: Work, kind: str, mesh: DeviceMesh, attachments: ExitStack) -> None:
        self._attachments = attachments
        self._sharded = partial(_sharded, work, kind, mesh)
        self._x, self._reference = _input(work, kind, dist.get_rank()), Reference()
        self._options = commplan.Options(timeout_s=work.timeout_s)
        alone = _build(work, kind)
        self.module_numel = sum(p.numel() for p in alone[0].parameters())
        native, native_async = self._sharded(), self._sharded()
        native_async._set_unshard_async_op(True)
        self._backwards = [
            Backward(work_.NATIVE, native, self._x, self._reference),
            Backward(work_.NATIVE_ASYNC, native_async, self._x, self._reference),
            Backward(work_.COMPUTE, alone, self._x),
        ]
        self._alone = _alone(work.num_modules, self.module_numel, mesh)

    def attach(self, names: Sequence[str], tell: Tell) -> dict[str, str]:
        """A model for each schedule; why it was left out, for those that `attach` refuses."""
        left_out: dict[str, str] = {}
        for name in names:
            tell({"attach": name})
            model = self._sharded()
            try:
                attachment = self._attachments.enter_context(commplan.attach(model, name, options=self._options))
            except CommplanError as error:
                left_out[name] = f"{type(error).__name__}: {error}"
                continue
            self._backwards.append(Backward(name, model, self._x, self._reference, attachment))
        return left_out

    def measured(self, names: Collection[str]) -> list[Measured]:
        """What has one of these names: stock FSDP2, schedules, things alone."""
        return [one for one in (*self._backwards, *self._alone) if one.name in names]

    def set_compute(self, setting: str) -> None:
        """Let the backward of each module sleep as long as `setting` says."""
        for one in self._backwards:
            for block in one.model:
                if isinstance(block, SleepingLinear):
                    block.seconds = float(setting) / 1e3


def _alone(num_modules: int, numel: int, mesh: DeviceMesh) -> list[Measured]:
    """Each kind of collective alone, of every module and of next to nothing, on the groups that stock FSDP2 uses; and copies.
    Values don't matter.
    """
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    # FSDP2 pads a parameter to a multiple of the ranks that share it.
    numel += -numel % shard.size()
    whole = torch.zeros(num_modules, numel)
    part = torch.zeros(num_modules, numel // shard.size())

    # New names in torch 2.13.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce_scatter(n: int, size: int) -> dist.Work:
        return scatter(part[n, :size], whole[n, : size * shard.size()], group=shard, async_op=True)

    def all_reduce(n: int, size: int) -> dist.Work:
        return dist.all_reduce(part[n, :size], group=replicate, async_op=True)

    def all_gather(n: int, size: int) -> dist.Work:
        return gather(whole[n, : size * shard.size()], part[n, :size], group=shard, async_op=True)

    kinds = {work_.REDUCE_SCATTERS: reduce_scatter, work_.ALL_REDUCES: all_reduce, work_.ALL_GATHERS: all_gather}
    small = dict(zip(work_.SMALL, kinds.values(), strict=True))

    def back_to_back(issue: Callable[[int, int], dist.Work]) -> None:
        for work in [issue(n, part.size(1)) for n in range(num_modules)]:
            work.wait()

    def one_by_one(issue: Callable[[int, int], dist.Work]) -> None:
        for n in range(num_modules):
            issue(n, 1).wait()

    def copy() -> None:
        for gradient in whole:
            torch.empty_like(gradient).copy_(gradient)

    return [
        *(Alone(name, partial(back_to_back, issue)) for name, issue in kinds.items()),
        *(Alone(name, partial(one_by_one, issue)) for name, issue in small.items()),
        Alone(work_.COPIES, copy),
    ]


def _run(work: Work, mesh: DeviceMesh, tell: Tell) -> dict[str, Any]:
    """Every setting in turn; what all ranks saw."""
    settings: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    names: Sequence[str] = work.schedules
    field: _Field | None = None
    with ExitStack() as attachments:
        for setting in work.settings:
            if field is None or setting == work_.REAL:
                # Another model: the one before goes first, for both would not fit into much memory.
                field = None
                attachments.close()
                field = _Field(work, setting, mesh, attachments)
                left_out |= field.attach(names, tell)
            field.set_compute(setting)
            measured = field.measured({*work.beside, *names}.difference(left_out))
            settings[setting] = {**measure(measured, work.rounds, _of(setting, tell)), "module_numel": field.module_numel}
            names = best_schedules(settings[setting]["times_s"])[: work.num_best]
    return {"settings": settings, "left_out": left_out, "torch": torch.__version__}


def _of(setting: str, tell: Tell) -> Tell:
    return lambda event: tell({"setting": setting, **event})


def main(work_path: str, rank_text: str, store_path: str, result_path: str) -> None:
    """Join the others through the file `store_path`, measure, and leave."""
    work, rank = Work.load(Path(work_path)), int(rank_text)
    leave_with_parent()
    torch.set_num_threads(1)

    def tell(event: dict[str, Any]) -> None:
        if rank == 0:
            print(json.dumps(event), flush=True)

    store = dist.FileStore(store_path, work_.WORLD_SIZE)
    timeout = timedelta(seconds=work.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=work_.WORLD_SIZE, timeout=timeout)
    mesh = init_device_mesh("cpu", work_.MESH, mesh_dim_names=("replicate", "shard"))
    result = _run(work, mesh, tell)
    if rank == 0:
        Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
