"""What `commplan.plan.wire` says of copies is what a backward copies. One process, with a fake process group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import commplan
from commplan.execute import collectives
from commplan.execute.gathering import Gathers
from commplan.ops import Kind
from commplan.plan.model import OpStep
from commplan.plan.wire import is_gathered_in_place, members_of, sent_as_it_lies

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from bench_run import fake_ranks

NUM_LAYERS = 4
WIDTH = 6


@dataclass(frozen=True)
class Case:
    """A schedule in which each op may be written otherwise, and the model that it drives."""

    ag: str = "AG_n"
    rs: str = "RS_n: {after: compute_n}"
    ar: str = "AR_n: {after: RS_n}"
    bias: bool = False
    frozen_bias: bool = False
    out_width: int = WIDTH
    shard_dim: int = 0
    policy: MixedPrecisionPolicy | None = None
    dtype: torch.dtype = torch.float32
    reduces_in_root: bool = False

    @property
    def schedule(self) -> str:
        """Its text."""
        post = [self.rs, *([] if self.reduces_in_root else [self.ar])]
        root = [*([self.ar] if self.reduces_in_root else []), "apply_n: {after: AR_n}"]
        lines = ["version: 1", "name: copying", "summary: One op of them is changed.", "pre_backward:"]
        lines += [f"  - {one}" for one in (self.ag, "wait: AG_n")]
        lines += ["post_backward:", *(f"  - {one}" for one in post), "root:", *(f"  - {one}" for one in root)]
        return "\n".join(lines) + "\n"

    def model(self) -> nn.Module:
        """Layers of one weight, or of a weight and a bias."""
        layers: list[nn.Module] = []
        for _ in range(NUM_LAYERS // 2):
            layers += [nn.Linear(WIDTH, self.out_width, self.bias), nn.Linear(self.out_width, WIDTH, self.bias)]
        model = nn.Sequential(*layers).to(self.dtype)
        if self.frozen_bias:
            for layer in layers:
                layer.bias.requires_grad_(False)  # type: ignore[union-attr]
        mesh, settings = fake_ranks.mesh_of(2, 2), {"mp_policy": self.policy or MixedPrecisionPolicy()}
        if self.shard_dim:
            settings["shard_placement_fn"] = lambda parameter: Shard(min(self.shard_dim, parameter.ndim - 1))  # type: ignore[assignment]
        for layer in layers:
            fully_shard(layer, mesh=mesh, **settings)  # type: ignore[arg-type]
        return fully_shard(model, mesh=mesh, **settings)  # type: ignore[arg-type, return-value]


def policy(compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)


CASES = {
    "plain": Case(),
    "a weight and a bias": Case(bias=True),
    "a frozen bias": Case(bias=True, frozen_bias=True),
    "padded": Case(out_width=5),
    "another dimension": Case(shard_dim=1),
    "pieces of a reduction": Case(rs="RS_n: {after: compute_n, chunks: 2}"),
    "pieces of a gather": Case(ag="AG_n: {chunks: 2}"),
    "buckets": Case(rs="RS_n: {after: compute_n, fuse: {modules: 3}}", ar="AR_n: {after: RS_n, fuse: {modules: 3}}"),
    "reduced later": Case(rs="RS_<n-1>: {after: compute_<n-1>}", reduces_in_root=True),
    "sent in bf16": Case(rs="RS_n: {after: compute_n, dtype: bf16}"),
    "all-reduced in fp16": Case(ar="AR_n: {after: RS_n, dtype: fp16}"),
    "bf16": Case(policy=policy(torch.bfloat16, torch.bfloat16)),
    "bf16, reduced in fp32": Case(policy=policy(torch.bfloat16, torch.float32)),
    "fp16": Case(policy=policy(torch.float16, torch.float16)),
    "fp64": Case(dtype=torch.float64),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_copied_is_what_the_plan_is_said_to_copy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    in_place: list[bool] = []
    pack: Callable[..., None] = collectives.pack
    gather_in_place: Callable[..., Any] = Gathers._in_place

    def counting_pack(instances: Sequence[Any], *args: Any) -> None:
        packed.append(len(instances))
        pack(instances, *args)

    def counting_gather(*args: Any) -> Any:
        found = gather_in_place(*args)
        in_place.append(found is not None)
        return found

    monkeypatch.setattr(collectives, "pack", counting_pack)
    monkeypatch.setattr(Gathers, "_in_place", counting_gather)
    with fake_ranks.fake_world(4):
        model = case.model()
        with commplan.attach(model, case.schedule, options=commplan.Options(timeout_s=20.0)) as attachment:
            for _ in range(2):
                packed.clear()
                in_place.clear()
                model(torch.ones(2, WIDTH, dtype=case.dtype, requires_grad=True)).float().sum().backward()
            plan = attachment.plan
    members, lies = members_of(plan), sent_as_it_lies(plan)
    ops = [step for step in plan.steps if isinstance(step, OpStep) and step.op.piece == 0]
    reduces = [step for step in ops if step.kind is Kind.REDUCE_SCATTER]
    gathers = [step for step in ops if step.kind is Kind.ALL_GATHER]
    assert packed == [len(step.op.members) for step in reduces if not lies(step)]
    assert in_place == [is_gathered_in_place(step, members(step)) for step in gathers]
    assert len(gathers) == NUM_LAYERS
