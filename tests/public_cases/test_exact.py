"""Values that are exact in every dtype involved, for every schedule: whatever was lost or counted twice shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commplan
from commplan.execute.lanes import Task
from commplan.fsdp2 import Options
from commplan.ops import Kind, OpId
from commplan.plan.model import OpStep
from tests.worlds import models, parity, reference
from tests.worlds.lazy import LazyLanes, PoisonedMemory
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class ExactPair(models.Pair):
    """F2. Weights, inputs and gradients are small multiples of 1/2."""

    def __init__(self) -> None:
        super().__init__()
        for number, p in enumerate(self.parameters()):
            halves = torch.arange(p.numel()).add(number) % 3 - 1
            p.data.copy_(halves.reshape(p.shape) / 2)


def later_parameter(here: Rank, uses: tuple[str, ...], flag: str) -> None:
    def backward(model: nn.Module, rank: int) -> None:
        for i, of_microbatch in enumerate(uses):
            if hasattr(model, "set_requires_all_reduce"):
                parity.set_flags(model, {flag: i == len(uses) - 1})
            x = (torch.arange(12).reshape(3, 4) + rank + i) % 3 - 1
            model.uses = of_microbatch
            ((rank + 1) * model(x.float()).float().sum()).backward()

    right = reference.gradients(ExactPair, here.size, backward)
    for schedule, params in parity.LIBRARY:
        model = fully_shard(ExactPair(), mesh=here.mesh((2, 2)), mp_policy=BF16)
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for _ in range(2):
                backward(model, here.rank)
                reference.assert_close(model, right, 0.0)
                model.zero_grad()


@pytest.mark.report("pytorch#196996", "parameters or modules in some microbatches only")
@pytest.mark.parametrize("flag", ["sync", "all_reduce"])
@pytest.mark.parametrize("uses", [("a", "ac"), ("ac", "a"), ("a", "c"), ("a", "ac", "c")])
def test_a_parameter_that_comes_with_a_later_microbatch(worlds: Worlds, uses: tuple[str, ...], flag: str) -> None:
    worlds.of(4).run(later_parameter, uses=uses, flag=flag)


def low_precision_sums(here: Rank, flag: str) -> None:
    """bf16 can't add 1 to 256; what is summed up before the all-reduce is in fp32."""
    scales = (256, 1, 1)
    for schedule, params in parity.LIBRARY:
        model = models.shard(models.fk(6), here.mesh((2, 2)), bf16=True)
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for i, scale in enumerate(scales):
                parity.set_flags(model, {flag: i == len(scales) - 1})
                (scale * (here.rank + 1) * model(torch.zeros(1, requires_grad=True)).float()).sum().backward()
            assert reference.values(model) == [2.5 * k * sum(scales) for k in range(1, 7)], schedule


@pytest.mark.report("partial sums in a low precision")
@pytest.mark.parametrize("flag", ["sync", "all_reduce"])
def test_partial_sums_are_kept_in_the_reduce_dtype(worlds: Worlds, flag: str) -> None:
    worlds.of(4).run(low_precision_sums, flag=flag)


@pytest.mark.report("partial sums in a low precision")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_that_is_low_they_are_as_those_of_stock(worlds: Worlds, dtype: torch.dtype) -> None:
    sharding = {"mp_policy": MixedPrecisionPolicy(dtype, dtype)}
    steps = [parity.NO_SYNC, parity.NO_ALL_REDUCE, parity.PLAIN]
    worlds.of(4).run(parity.compare, name="FN", shape=(2, 2), steps=steps, sharding=sharding, lazy=True)


class Noting(LazyLanes):
    """Notes what is submitted: (lane, op, module)."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.submitted: list[tuple[str, str, str]] = []

    def submit(self, lane: str, task: Task, waits: object) -> object:  # type: ignore[override]
        if task.is_communication:
            self.submitted.append((lane, task.op, task.module))
        return super().submit(lane, task, waits)  # type: ignore[arg-type]


def own_slots(here: Rank) -> None:
    for schedule, params in parity.LIBRARY:
        lanes = Noting(60.0)
        model = models.shard(models.fk(6), here.mesh((2, 2)))
        options = Options(timeout_s=60, make_lanes=lambda device, timeout_s, lanes=lanes: lanes, make_memory=PoisonedMemory)
        with commplan.attach(model, schedule, options=options, **params) as attachment:
            ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
            ops = [s for s in attachment.plan.steps if isinstance(s, OpStep) and s.kind is not Kind.APPLY]
            names = [m.name for m in attachment.plan.modules.modules]
        assert names == [str(i) for i in reversed(range(6))]
        # Modules are needed in the order in which they complete.
        assert attachment.plan.modules.need_order == tuple(range(6))
        assert lanes.submitted == [(s.lane, str(s.op), ", ".join(names[n] for n in s.op.members)) for s in ops], schedule
        ran = [OpId.parse(op) for _, op, _ in lanes.submitted]
        all_reduced = [n for op in ran if op.family == "AR" and op.piece == 0 for n in op.members]
        assert sorted(all_reduced) == list(range(6)), schedule
        assert reference.values(model) == [2.5 * k for k in range(1, 7)], schedule


@pytest.mark.report("hyper-parallel#305")
def test_each_module_is_reduced_once_in_its_own_slot(worlds: Worlds) -> None:
    worlds.of(4).run(own_slots)


def reference_of_fn(here: Rank, name: str, shape: tuple[int, int]) -> None:
    problem = parity.PROBLEMS[name]
    right = reference.gradients(problem.build, here.size, reference.microbatches(problem, 1))
    for schedule, params in parity.LIBRARY:
        model = parity.build(problem, here, shape, {})
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            problem.loss(model(problem.batch(here.rank, 0)), here.rank).backward()
            reference.assert_close(model, right)


@pytest.mark.parametrize("name", ["FN", "FN plain input", "FN twice", "FN unused"])
def test_reference_on_six_ranks(worlds: Worlds, name: str) -> None:
    worlds.of(6).run(reference_of_fn, name=name, shape=(2, 3))
