"""Gradients have the right values, by arithmetic and by an unsharded reference, and cost the right number of collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import commplan
from commplan.fsdp2 import Attachment
from commplan.language import library
from commplan.ops import OpId
from commplan.plan.model import OpStep
from tests.worlds import models, parity, reference
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]


def fk_step(here: Rank, model: nn.Module, num_microbatches: int = 1, **flags: bool) -> None:
    """One step of FK; `flags` hold for every microbatch but the last."""
    for i in range(num_microbatches):
        parity.set_flags(model, flags if i < num_microbatches - 1 else {})
        ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()


UNFUSED = tuple(of for of in parity.LIBRARY if "fuse" not in library.find(of[0]).read_text(encoding="utf-8"))
"""Schedules under which each collective is that of one module."""


def num_ops(attachment: Attachment, so_far: Counter[str] | None = None) -> Counter[str]:
    """Reductions of the last backward by family, the pieces of one counted once, added to `so_far`."""
    report = attachment.last_backward
    assert report is not None
    ops = (OpId.parse(interval.op) for interval in report.ops)
    return (so_far or Counter()) + Counter(op.family for op in ops if op.family != "AG" and op.piece == 0)


# Values known by arithmetic.


def fk_case(here: Rank, shape: tuple[int, ...], sharding: dict[str, Any], change: str | None, per_k: float) -> None:
    torch.manual_seed(0)
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    for schedule, params in parity.LIBRARY:
        model = models.shard(models.fk(6), here.mesh(shape, names), **sharding)
        for module in model.modules():
            if change == "factor" and isinstance(module, models.Scaled):
                module.set_gradient_divide_factor(8)  # type: ignore[operator]
            # gloo can't divide by a factor itself, so both go together.
            if change and isinstance(module, models.Scaled):
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            fk_step(here, model)
            assert reference.values(model) == [k * per_k for k in range(1, 7)], schedule


DEGENERATE = pytest.mark.report("pytorch#144045", "verl#7493")
DIVIDED = pytest.mark.report("pytorch#155903")


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        pytest.param((2, 2), None, marks=pytest.mark.report("pytorch#180889")),
        ((4,), None),
        pytest.param((4, 1), None, marks=DEGENERATE),
        pytest.param((1, 4), None, marks=DEGENERATE),
        pytest.param((2, 2), "factor", marks=DIVIDED),
        pytest.param((4,), "factor", marks=DIVIDED),
        pytest.param((2, 2), "force_sum", marks=DIVIDED),
        pytest.param((4,), "force_sum", marks=DIVIDED),
    ],
)
def test_fk(worlds: Worlds, shape: tuple[int, ...], change: str | None) -> None:
    per_k = 1.25 if change == "factor" else 2.5
    worlds.of(4).run(fk_case, shape=shape, sharding={}, change=change, per_k=per_k)


AVERAGED = pytest.mark.report("pytorch#162338")


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param({"mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32)}, id="fp32", marks=AVERAGED),
        pytest.param({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}, id="bf16", marks=AVERAGED),
        pytest.param({"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}, id="fp16", marks=AVERAGED),
        pytest.param(
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, id="offload", marks=pytest.mark.report("pytorch#180665")
        ),
    ],
)
def test_fk_policies(worlds: Worlds, sharding: dict[str, Any]) -> None:
    worlds.of(4).run(fk_case, shape=(2, 2), sharding=sharding, change=None, per_k=2.5)


def big_fp16(here: Rank) -> None:
    for schedule, params in parity.LIBRARY:
        model = models.shard(models.fk(1), here.mesh((2, 2)), mp_policy=MixedPrecisionPolicy(torch.float16, torch.float16))
        with commplan.attach(model, schedule, **params):
            (20000 * model(torch.zeros(1, requires_grad=True))).sum().backward()
        assert reference.values(model) == [20000.0], schedule


@pytest.mark.report("pytorch#106034")
def test_fp16_does_not_overflow(worlds: Worlds) -> None:
    """The sum of four local gradients of 20000 is beyond fp16; divided before and after, it is not."""
    worlds.of(4).run(big_fp16)


def norms(here: Rank) -> list[float]:
    found = []
    for schedule, params in parity.LIBRARY:
        model = parity.build(FN, here, (2, 2), {})
        with commplan.attach(model, schedule, **params):
            FN.loss(model(FN.batch(here.rank, 0)), here.rank).backward()
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item())  # type: ignore[attr-defined]
    return found


@pytest.mark.report("VeOmni#862")
def test_global_norm(worlds: Worlds) -> None:
    """Replicas counted twice would make it 0.749722."""
    for found in worlds.of(4).run(norms):
        assert found == pytest.approx([0.530134] * len(parity.LIBRARY), abs=1e-6)


# Numbers of collectives.


def accumulation_counts(here: Rank, flag: str, num_microbatches: int, num_reduce_scatters: int) -> None:
    for schedule, params in UNFUSED:
        model = models.shard(models.fk(6), here.mesh((2, 2)))
        counted: Counter[str] = Counter()
        with commplan.attach(model, schedule, **params) as attachment:
            for i in range(num_microbatches):
                parity.set_flags(model, {flag: i == num_microbatches - 1})
                before = attachment.last_backward
                ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
                if attachment.last_backward is not before:
                    counted = num_ops(attachment, counted)
        assert reference.values(model) == [2.5 * num_microbatches * k for k in range(1, 7)], schedule
        assert counted == {"RS": num_reduce_scatters, "AR": 6}, schedule


@pytest.mark.report("Megatron-LM#7186")
@pytest.mark.parametrize(
    ("flag", "num_microbatches", "num_reduce_scatters"), [("all_reduce", 4, 24), ("all_reduce", 3, 18), ("sync", 3, 6)]
)
def test_accumulation(worlds: Worlds, flag: str, num_microbatches: int, num_reduce_scatters: int) -> None:
    arguments = {"flag": flag, "num_microbatches": num_microbatches, "num_reduce_scatters": num_reduce_scatters}
    worlds.of(4).run(accumulation_counts, **arguments)


def problem_counts(here: Rank, name: str) -> dict[str, dict[str, int]]:
    problem = parity.PROBLEMS[name]
    counted = {}
    for schedule, params in UNFUSED:
        model = parity.build(problem, here, (2, 2), {})
        with commplan.attach(model, schedule, **params) as attachment:
            problem.loss(model(problem.batch(here.rank, 0)), here.rank).backward()
            counted[f"{schedule} {params}"] = dict(num_ops(attachment))
    return counted


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("FN", 4),
        pytest.param("FN plain input", 4, marks=pytest.mark.report("pytorch#129259")),
        pytest.param("FN twice", 4, marks=pytest.mark.report("fairscale#780", "pytorch#139671")),
        pytest.param("FN unused", 3, marks=pytest.mark.report("pytorch#83129", "pytorch#148756")),
        ("FN reversed", 4),
        pytest.param("transformer", 3, marks=pytest.mark.report("torchtitan#3821")),
    ],
)
def test_each_group_is_reduced_once(worlds: Worlds, name: str, right: int) -> None:
    for of_rank in worlds.of(4).run(problem_counts, name=name):
        for schedule, counted in of_rank.items():
            assert counted == {"RS": right, "AR": right}, schedule


def ops_run(here: Rank) -> None:
    for schedule, params in parity.LIBRARY:
        model = parity.build(FN, here, (2, 2), {})
        with commplan.attach(model, schedule, **params) as attachment:
            FN.loss(model(FN.batch(here.rank, 0)), here.rank).backward()
            report = attachment.last_backward
            planned = [str(s.op) for s in attachment.plan.steps if isinstance(s, OpStep) and s.axis is not None]
        assert report is not None
        assert sorted(interval.op for interval in report.ops) == sorted(planned), schedule


def test_each_collective_of_the_plan_runs_once(worlds: Worlds) -> None:
    """Buckets, pieces and all-gathers too."""
    worlds.of(4).run(ops_run)


# An unsharded reference.


def problem_reference(here: Rank, name: str, steps: list[parity.Step], lazy: bool) -> None:
    problem = parity.PROBLEMS[name]
    for step in steps:
        expected = reference.gradients(problem.build, here.size, reference.microbatches(problem, len(step)))
        model = parity.build(problem, here, (2, 2), {})
        with commplan.attach(model, "pipelined_allreduce", options=parity.LAZY if lazy else parity.EAGER):
            for i, flags in enumerate(step):
                parity.set_flags(model, flags)
                problem.loss(model(problem.batch(here.rank, i)), here.rank).backward()
            reference.assert_close(model, expected, 2e-6 if name == "FK6" else reference.TOLERANCE)


REPORTS = {
    "FN plain input": pytest.mark.report("pytorch#129259"),
    "FN twice": pytest.mark.report("fairscale#780", "pytorch#139671"),
    "FN unused": pytest.mark.report("pytorch#83129", "pytorch#148756"),
    "FN reversed": pytest.mark.report("another order of backward than the plan's"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=REPORTS.get(name, ())) for name in sorted(parity.PROBLEMS)])
def test_reference(worlds: Worlds, name: str) -> None:
    steps = [parity.PLAIN, parity.NO_SYNC, parity.NO_ALL_REDUCE]
    worlds.of(4).run(problem_reference, name=name, steps=steps, lazy=name != "FN")


def tied() -> nn.Module:
    """Embedding and head share their weight, in one group."""
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return model


class Checkpointed(nn.Module):
    """FN whose block 1 runs twice, each time in a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.b = models.Net().b
        self.head = nn.Linear(4, 2, bias=False)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b[0](x)
        for _ in range(2):
            x = checkpoint(self.b[1], x, use_reentrant=self.reentrant)
        return self.head(self.b[2](x))


def two_forwards(model: nn.Module, rank: int) -> None:
    losses = [FN.loss(model(FN.batch(rank, i)), rank) for i in range(2)]
    for loss in losses:
        loss.backward()


def tokens(model: nn.Module, rank: int) -> None:
    model(torch.arange(6).roll(rank)[:4]).pow(2).mean().backward()


def one_backward(model: nn.Module, rank: int) -> None:
    FN.loss(model(FN.batch(rank, 0)), rank).backward()


def plain_input(model: nn.Module, rank: int) -> None:
    model(FN.batch(rank, 0).detach()).sum().backward()


SITUATIONS: dict[str, tuple[Callable[[], nn.Module], reference.Backward]] = {
    "one Linear, plain input": (lambda: nn.Linear(4, 3), plain_input),
    "two forwards, then two backwards": (models.Net, two_forwards),
    "tied weights in one group": (tied, tokens),
    "checkpoint": (lambda: Checkpointed(reentrant=False), one_backward),
    "reentrant checkpoint": (lambda: Checkpointed(reentrant=True), one_backward),
}


def situation(here: Rank, name: str) -> None:
    build, backward = SITUATIONS[name]
    expected = reference.gradients(build, here.size, backward)
    for schedule, params in parity.LIBRARY:
        torch.manual_seed(0)
        model = build()
        for block in getattr(model, "b", ()):
            fully_shard(block, mesh=here.mesh((2, 2)))
        fully_shard(model, mesh=here.mesh((2, 2)))
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for _ in range(2):
                backward(model, here.rank)
                reference.assert_close(model, expected)
                model.zero_grad()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("one Linear, plain input", marks=pytest.mark.report("pytorch#86051")),
        pytest.param("two forwards, then two backwards", marks=pytest.mark.report("pytorch#106637")),
        pytest.param("tied weights in one group", marks=pytest.mark.report("pytorch#176225")),
        "checkpoint",
        pytest.param("reentrant checkpoint", marks=pytest.mark.report("one block in two reentrant checkpoints")),
    ],
)
def test_situations(worlds: Worlds, name: str) -> None:
    worlds.of(4).run(situation, name=name)


def unused_without_sync(here: Rank) -> None:
    problem = parity.PROBLEMS["FN unused"]
    expected = reference.gradients(problem.build, here.size, reference.microbatches(problem, 2))
    model = parity.build(problem, here, (2, 2), {"bf16": True})
    with commplan.attach(model, "pipelined_allreduce"):
        for i in range(2):
            parity.set_flags(model, {"sync": i == 1})
            problem.loss(model(problem.batch(here.rank, i)), here.rank).backward()
        reference.assert_close(model, expected, 0.1)


def test_unused_block_without_sync_in_bf16(worlds: Worlds) -> None:
    """Stock FSDP2 raises here."""
    worlds.of(4).run(unused_without_sync)


class BentPair(models.Pair):
    """F2 with a tanh behind each Linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.uses:
            x = torch.tanh(getattr(self, name)(x))
        return x


def partial_use(here: Rank, uses: list[str], flags: list[dict[str, bool]], bf16: bool) -> None:
    """Microbatches that use different parameters of one group, against the reference."""

    def backward(model: nn.Module, rank: int) -> None:
        for i, use in enumerate(uses):
            model.uses = use
            if hasattr(model, "set_requires_all_reduce"):
                parity.set_flags(model, flags[i])
            FN.loss(model(FN.batch(rank, i)).float(), rank).backward()

    expected = reference.gradients(BentPair, here.size, backward)
    for schedule, params in parity.DIFFERENT:
        torch.manual_seed(0)
        kwargs = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if bf16 else {}
        model = fully_shard(BentPair(), mesh=here.mesh((2, 2)), **kwargs)
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for _ in range(2):
                backward(model, here.rank)
                reference.assert_close(model, expected, 0.1 if bf16 else 1e-6)
                model.zero_grad()


@pytest.mark.report("parameters or modules in some microbatches only")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("flag", ["sync", "all_reduce"])
@pytest.mark.parametrize("uses", [["a", "ac"], ["ac", "a"], ["a", "c"]])
def test_parameters_in_some_microbatches_only(worlds: Worlds, uses: list[str], flag: str, bf16: bool) -> None:
    """Stock FSDP2 keys partial sums by position, and loses or leaks some of these."""
    worlds.of(4).run(partial_use, uses=uses, flags=[{flag: False}, {}], bf16=bf16)


def group_without_last_gradient(here: Rank) -> list[list[float | None]]:
    """Block 1 takes part in the first microbatch only; its partial sum is all-reduced all the same."""
    found = []
    for schedule, params in parity.LIBRARY:
        torch.manual_seed(0)
        model = models.shard(models.fk(3), here.mesh((2, 2)))
        blocks = list(model)  # type: ignore[call-overload]
        with commplan.attach(model, schedule, options=parity.LAZY, **params):
            for used in (blocks, [blocks[0], blocks[2]]):
                parity.set_flags(model, {"all_reduce": used is not blocks})
                x = torch.zeros(1, requires_grad=True)
                model.forward = lambda x, used=used: sum((b(x) for b in used), torch.zeros(1))
                ((here.rank + 1) * model(x)).sum().backward()
            found.append(list(reference.values(model)))
            model.zero_grad()
    return found


@pytest.mark.report("parameters or modules in some microbatches only")
def test_partial_sum_of_a_group_that_gets_nothing_more(worlds: Worlds) -> None:
    for found in worlds.of(4).run(group_without_last_gradient):
        assert found == [[5.0, 5.0, 15.0]] * len(parity.LIBRARY)
