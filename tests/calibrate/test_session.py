"""Profiles of training jobs in four real processes: what they hold, what they leave behind, and that nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import commplan
from commplan.calibrate import Limits, Outcome, Settings, copying, run, session
from commplan.calibrate.copying import copies_of, memory_bytes_per_s
from commplan.errors import CommplanError, Severity
from commplan.fsdp2 import faults, torch_private
from commplan.language.modules import ModuleTable
from commplan.language.profiles import Profile, parse_profile
from commplan.ops import Axis, Kind
from commplan.simulate import costs, simulate
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

LIMITS = Limits(budget_s=1.0, timeout_s=60.0)
NUM_STEPS = 2 + 2 * (session.WARM_UP_STEPS + 2)
"""The model is found at the first, and everything is there after the second; then two blocks of two counted steps."""


@dataclass
class Told:
    """What a measurement tells."""

    lines: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def progress(self, line: str) -> None:
        self.lines.append(line)

    def outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Job:
    """A training script: blocks of two sizes, two microbatches a step; counts its steps."""

    def __init__(self, here: Rank, *, bf16: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = models.shard(models.Mlps((40, 64, 40), head=3), here.mesh((2, 2)), bf16=bf16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps = 0
        self.seed = here.rank
        self.saw_a_schedule = False

    def train(self, num_steps: int = 1000) -> None:
        torch.manual_seed(self.seed)
        for _ in range(num_steps):
            self.steps += 1
            for micro in range(2):
                self.model.set_requires_gradient_sync(micro == 1)
                self.model(torch.randn(3, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parameters(self) -> list[torch.Tensor]:
        return [p.to_local().clone() for p in self.model.parameters()]

    @property
    def is_driven(self) -> bool:
        states = [state for _, state in torch_private.states(self.model)]
        owners = [*states, *(group for state in states for group in torch_private.groups(state))]
        return any(torch_private.replaced_attributes(owner) for owner in owners)


def calibrated(work: Callable[[], object], **settings: Any) -> tuple[Outcome, bool]:
    told = Told()
    is_ended = run(Settings(2, LIMITS, "commplan profile -- it", **settings), work, told)
    (outcome,) = told.outcomes
    return outcome, is_ended


def whole(here: Rank) -> tuple[str | None, str | None, bool, int]:
    job = Job(here)
    outcome, is_ended = calibrated(job.train)
    assert (outcome.error, outcome.problem, is_ended) == (None, "", True)
    assert not job.is_driven
    plain = Job(here)
    plain.train(job.steps)
    is_undisturbed = all(torch.equal(a, b) for a, b in zip(job.parameters(), plain.parameters(), strict=True))
    found = outcome.calibrated
    if found is None:
        return None, None, is_undisturbed, job.steps
    return found.profile, found.table.model_dump_json(), is_undisturbed, job.steps


def test_a_profile_of_a_job_is_whole_and_training_is_not_disturbed(worlds: Worlds) -> None:
    ranks = worlds.of(4).run(whole)
    assert [(profile is None, is_undisturbed, steps) for profile, _, is_undisturbed, steps in ranks] == [
        (rank > 0, True, NUM_STEPS) for rank in range(4)
    ]
    text, table_text, *_ = ranks[0]
    profile, table = parse_profile(text), commplan.compiler.module_table(table_text)
    assert profile.compute_s.modules.keys() == {"(root)", "b.0", "b.1", "b.2"} == {m.name for m in table.modules}
    assert all(seconds > 0 for name, seconds in profile.compute_s.modules.items() if name != "(root)")
    for axis, kind, largest in (
        (Axis.SHARD, Kind.ALL_GATHER, max(m.gathered_bytes for m in table.modules)),
        (Axis.SHARD, Kind.REDUCE_SCATTER, max(m.reduced_bytes for m in table.modules)),
        (Axis.REPLICATE, Kind.ALL_REDUCE, max(m.shard_bytes for m in table.modules)),
    ):
        transfer = profile.transfer(axis, kind)
        # The model is smaller than the smallest size of a sweep: its own is the only one.
        ((at_bytes, _),) = transfer.points
        assert at_bytes == 0
        assert sum(transfer.seconds(largest)) > 0
    assert profile.axes[Axis.SHARD].fsdp2_all_gather is not None
    assert profile.fsdp2_gathers == "blocking"
    assert profile.host.issue_s > 0
    for said in (
        "measured by: commplan profile -- it",
        "date: 20",
        "versions: commplan",
        f"torch {torch.__version__}",
        "4 ranks on",
        "backend gloo",
        "mesh (2, 2)",
        "cores",
        "check: a backward under blocking took",
        "check: a backward under prefetch_overlap took",
    ):
        assert said in profile.source
    assert text.count("the middle half of") >= 8
    for name in ("blocking", "prefetch_overlap", "delayed_allreduce"):
        plan = commplan.compile(name, table)
        assert simulate(plan, costs(plan, profile)).duration_s > sum(profile.compute_s.modules.values())


class Lasting:
    """A collective that takes time on a known clock when it is waited for."""

    def __init__(self, work: dist.Work, clock: Known, seconds: float) -> None:
        self._work, self._clock, self._seconds = work, clock, seconds

    def is_completed(self) -> bool:
        return False

    def wait(self, *timeout: Any) -> bool:
        self._clock.takes(self._seconds)
        return self._work.wait(*timeout)


class Known:
    """A clock for `Watch` and for waits of the host on which nothing takes time but what says so."""

    GATHERED_PER_S = 1e6
    """Elements that an all-gather of the calling thread brings in a second."""

    COPIED_PER_S = 4e6
    """Elements that are copied for it."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._thread = threading.get_ident()

    def now(self) -> float:
        return self._now_s

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def takes(self, seconds: float) -> None:
        self._now_s += seconds

    @contextmanager
    def told(self) -> Iterator[None]:
        """Inside, it is the clock of measurements, and FSDP2's own all-gathers take time."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "clock_of", lambda device: self)
            patch.setattr(faults, "time", SimpleNamespace(perf_counter=self.now))
            for name in ("all_gather_into_tensor", "all_gather_single"):
                if hasattr(dist, name):
                    patch.setattr(dist, name, partial(self._gather, getattr(dist, name)))
            yield

    def _gather(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        if threading.get_ident() != self._thread:
            return work
        numel = max(a.numel() for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        self.takes(numel / self.COPIED_PER_S)
        return Lasting(work, self, numel / self.GATHERED_PER_S)


class Slow(torch.autograd.Function):
    """Backward takes time on a known clock."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: SlowBlock) -> torch.Tensor:
        ctx.block = block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.block.clock.takes(ctx.block.backward_s)
        return grad, None


class SlowBlock(nn.Module):
    def __init__(self, clock: Known, backward_s: float, *, forward_s: float = 0.0, ballast: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ballast = nn.Parameter(torch.zeros(ballast)) if ballast else None
        self.clock, self.backward_s, self.forward_s = clock, backward_s, forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.takes(self.forward_s)
        if self.ballast is not None:
            x = x + self.ballast.sum()
        return Slow.apply(torch.tanh(self.linear(x)), self)


def trained(model: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def work() -> None:
        while True:
            model(torch.randn(2, 8, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def measured(clock: Known, model: Any) -> tuple[str, str] | None:
    """Profile and table, where all takes what `clock` says."""
    with clock.told():
        outcome, _ = calibrated(trained(model))
    assert (outcome.error, outcome.problem) == (None, "")
    found = outcome.calibrated
    return (found.profile, found.table.model_dump_json()) if found else None


def of_known_times(here: Rank) -> tuple[str, str] | None:
    torch.manual_seed(0)
    clock = Known()
    # The first, whose backward is the last, is by far the largest.
    blocks = SlowBlock(clock, 0.0, ballast=4000), SlowBlock(clock, 0.3), SlowBlock(clock, 0.1), SlowBlock(clock, 5.0)
    net = nn.Sequential(*blocks)
    net.forward = lambda x: net[2](net[1](net[0](x)))
    return measured(clock, models.shard(net, here.mesh((2, 2))))


def test_compute_and_gathers_are_told_by_module(worlds: Worlds) -> None:
    """Of modules of two sizes; one of them is never used."""
    (text, table_text), *_ = worlds.of(4).run(of_known_times)
    profile, table = parse_profile(text), commplan.compiler.module_table(table_text)
    assert profile.compute_s.modules == pytest.approx({"0": 0.0, "1": 0.3, "2": 0.1, "3": 0.0})
    assert profile.compute_s.default == pytest.approx(0.2)
    gather = profile.axes[Axis.SHARD].fsdp2_all_gather
    assert gather is not None
    sizes = {module.name: module.gathered_bytes for module in table.modules}
    assert sizes["0"] > 10 * sizes["1"] == 10 * sizes["2"]
    for size_bytes in sizes.values():
        assert sum(gather.seconds(size_bytes)) == pytest.approx(size_bytes / 4 / Known.GATHERED_PER_S)
    assert profile.host.fsdp2_copy_bytes_per_s == pytest.approx(4 * Known.COPIED_PER_S)


class Checkpointed(nn.Sequential):
    """Runs its forward again in backward: each block alone and reentrant, or all at once."""

    is_reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self if self.is_reentrant else [super().forward]:
            x = checkpoint(part, x, use_reentrant=self.is_reentrant)
        return x


def with_recompute(here: Rank, *, is_reentrant: bool) -> tuple[str, str] | None:
    torch.manual_seed(0)
    clock = Known()
    sizes = (0.3, 100), (0.1, 4000), (0.2, 200)
    net = Checkpointed(*(SlowBlock(clock, seconds, forward_s=seconds / 2, ballast=ballast) for seconds, ballast in sizes))
    net.is_reentrant = is_reentrant
    return measured(clock, models.shard(net, here.mesh((2, 2))))


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_forward_that_is_run_again_is_compute_and_its_gathers_are_not(worlds: Worlds, is_reentrant: bool) -> None:
    (text, table_text), *_ = worlds.of(4).run(with_recompute, is_reentrant=is_reentrant)
    profile, table = parse_profile(text), commplan.compiler.module_table(table_text)
    found = profile.compute_s.modules
    assert sum(found.values()) == pytest.approx(0.9)
    if is_reentrant:
        assert found == pytest.approx({"0": 0.45, "1": 0.15, "2": 0.3})
    gather = profile.axes[Axis.SHARD].fsdp2_all_gather
    assert gather is not None
    for module in table.modules:
        assert sum(gather.seconds(module.gathered_bytes)) == pytest.approx(module.gathered_bytes / 4 / Known.GATHERED_PER_S)


def refusing(here: Rank) -> tuple[str, list[str]] | None:
    """Blocks run in another order than they are in, and no schedule may gather."""
    torch.manual_seed(0)
    model: Any = models.shard(models.Net(path=(2, 0, 1)), here.mesh((2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        attach = session.attach

        def picky(model: nn.Module, schedule: str, **kwargs: Any) -> Any:
            if schedule == session.BESIDE:
                raise CommplanError("not here")
            return attach(model, schedule, **kwargs)

        patch.setattr(session, "attach", picky)

        def work() -> None:
            while True:
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        outcome, _ = calibrated(work)
    found = outcome.calibrated
    if found is None:
        return None
    return found.profile, [module.name for module in found.table.modules]


def test_the_table_has_the_real_orders_where_nothing_runs_beside_compute(worlds: Worlds) -> None:
    (text, names), *_ = worlds.of(4).run(refusing)
    assert "communication was not measured beside compute: not here" in text
    assert [name for name in names if name != "(root)"] == ["b.1", "b.0", "b.2"]


def test_memory_is_as_fast_as_the_middle_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(size_bytes: int) -> float:
        # Copies of 1, 2 ... 9 ms.
        clock = iter([time_s for n in range(1, 10) for time_s in (n, n + n / 1e3)])
        with monkeypatch.context() as patch:
            patch.setattr(copying, "time", SimpleNamespace(perf_counter=clock.__next__))
            return memory_bytes_per_s(size_bytes)

    assert of(1 << 20) == pytest.approx((1 << 20) / 0.005)
    assert of(1 << 30) == pytest.approx((64 << 20) / 0.005)
    assert of(0) == pytest.approx(1 / 0.005)


def test_what_has_no_shard_axis_is_packed_for_its_all_reduce() -> None:
    whole = ModuleTable.uniform(3)
    plan = commplan.compile("prefetch_overlap", whole)
    module = whole.modules[0]
    assert copies_of(plan, packs_lone=True) == (3 * module.reduced_bytes, 0)
    assert copies_of(plan, packs_lone=False) == (0, 0)
    replicated = ModuleTable(modules=tuple(m.model_copy(update={"axes": {Axis.REPLICATE: 4}}) for m in whole.modules))
    for packs_lone in (True, False):
        found, _ = copies_of(commplan.compile("blocking", replicated), packs_lone=packs_lone)
        assert found == sum(module.reduced_bytes for module in replicated.modules) > 0


def partly_frozen(here: Rank) -> str | None:
    torch.manual_seed(0)
    clock = Known()
    net = nn.Sequential(SlowBlock(clock, 0.0), SlowBlock(clock, 0.3), SlowBlock(clock, 0.0))
    net[1].requires_grad_(False)
    model = models.shard(net, here.mesh((2, 2)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def work() -> None:
        # The script's own schedule makes way for those of the measurement.
        attachment = commplan.attach(model, "delayed_allreduce", k=2)
        while True:
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert attachment.plan.schedule in {"delayed_allreduce", "blocking", "prefetch_overlap"}

    with clock.told():
        outcome, is_ended = calibrated(work)
    assert is_ended, outcome
    found = outcome.calibrated
    if found is None:
        return None
    plan = commplan.compile("blocking", found.table)
    assert simulate(plan, costs(plan, parse_profile(found.profile))).duration_s > 0.3
    return found.profile


def test_compute_of_what_is_frozen_counts_with_what_comes_next(worlds: Worlds) -> None:
    text, *_ = worlds.of(4).run(partly_frozen)
    found = parse_profile(text).compute_s.modules
    assert found == pytest.approx({"0": 0.3, "2": 0.0})


def unlike(here: Rank) -> str:
    told = Told()
    run(Settings(1 + here.rank % 2, LIMITS), Job(here).train, told)
    return str(told.outcomes[0].error)


def test_ranks_that_were_started_unlike(worlds: Worlds) -> None:
    for error in worlds.of(4).run(unlike):
        assert "ranks disagree on how to measure" in error


def short(here: Rank) -> tuple[str, bool]:
    job = Job(here)
    outcome, is_ended = calibrated(partial(job.train, 3))
    assert not job.is_driven
    assert outcome.calibrated is None
    return outcome.problem, is_ended


def test_a_script_that_ends_early_gives_no_profile(worlds: Worlds) -> None:
    for problem, is_ended in worlds.of(4).run(short):
        assert "the script ended in the first steps, before everything was measured" in problem
        assert not is_ended


def in_bf16(here: Rank) -> str | None:
    outcome, _ = calibrated(Job(here, bf16=True).train)
    return outcome.calibrated.profile if outcome.calibrated else None


def test_dtypes_are_the_jobs_own(worlds: Worlds) -> None:
    text, *_ = worlds.of(4).run(in_bf16)
    after = {kind: text.split(f"\n    {kind}:")[0].splitlines()[-2] for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    assert "bfloat16" in after["all_gather"]
    assert "float32" in after["reduce_scatter"]
    assert "float32" in after["all_reduce"]
    assert isinstance(parse_profile(text), Profile)


def test_on_a_device_nothing_runs_beside_compute() -> None:
    """Under the schedule by which compute is measured there; every collective takes as long as a module."""
    assert [found for found in commplan.check(session.ON_DEVICE) if found.severity is Severity.ERROR] == []
    plan = commplan.compile(session.ON_DEVICE, 5)
    second = {"points": [[0, 1]]}
    axes = {
        "shard": {"link": "a", "all_gather": second, "reduce_scatter": second},
        "replicate": {"link": "b", "all_reduce": second},
    }
    profile = Profile.model_validate({"name": "seconds", "compute_s": {"default": 1}, "axes": axes})
    found = simulate(plan, costs(plan, profile))
    for op in found.ops:
        for compute in found.compute:
            assert op.end_s <= compute.begin_s or compute.end_s <= op.begin_s
