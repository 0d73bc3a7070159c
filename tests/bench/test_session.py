"""Measurements of scripts in four real processes: what is found, counted, compared, and left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import commplan
from commplan import language
from commplan.bench import Candidate, Outcome, Settings, run
from commplan.bench.builtin import Size, default_replicas, train
from commplan.bench.figures import STOCK, Result
from commplan.bench.session import WARM_UP_STEPS
from commplan.errors import AttachError, ExecutionError
from commplan.fsdp2 import Attachment, torch_private
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

SCHEDULES = ("overlapped_allreduce", "windowed_allreduce")

OPENING_STEPS = 2
"""The model is found at the first, and schedules are tried after the second."""


@dataclass
class Told:
    """What a measurement tells."""

    lines: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def progress(self, line: str) -> None:
        self.lines.append(line)

    def outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def candidates(names: Sequence[str] = SCHEDULES, **params: int) -> tuple[Candidate, ...]:
    return tuple(Candidate(name, language.resolve(name), params, commplan.Options(timeout_s=60)) for name in names)


def measured(work: Callable[[], object], of: tuple[Candidate, ...] | None = None, **settings: Any) -> tuple[Outcome, bool]:
    """What came of it, and whether the measurement ended the script; nothing of it is left in torch or commplan."""
    told = Told()
    hooks = modules._global_forward_pre_hooks, optimizers._global_optimizer_post_hooks, optimizers._global_optimizer_pre_hooks
    before = [len(of_kind) for of_kind in hooks]
    attach = commplan.attach
    is_ended = run(Settings(candidates() if of is None else of, **{"num_steps": 3, "block": 2, **settings}), work, told)
    assert [len(of_kind) for of_kind in hooks] == before
    assert commplan.attach is attach
    (outcome,) = told.outcomes
    return outcome, is_ended


def steps_of(result: Result) -> dict[str, int]:
    return {row.name: len(row.samples) for row in result.rows}


def expected_steps(num_rows: int, num_steps: int = 3, block: int = 2) -> int:
    num_rounds = -(-num_steps // block)
    return OPENING_STEPS + num_rows * (num_steps + num_rounds * WARM_UP_STEPS)


class Job:
    """A training script: FN with dropout, two microbatches a step; counts its steps."""

    def __init__(self, here: Rank) -> None:
        torch.manual_seed(0)
        self.net = models.Net()
        self.net.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 2, bias=False))
        self.model = models.shard(self.net, here.mesh((2, 2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps = 0
        self.has_cleaned_up = False
        self.seed = here.rank

    def step(self) -> None:
        for micro in range(2):
            self.model.set_requires_gradient_sync(micro == 1)
            self.model(torch.randn(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_steps: int = 1000) -> None:
        torch.manual_seed(self.seed)
        try:
            for _ in range(num_steps):
                self.steps += 1
                self.step()
        finally:
            self.has_cleaned_up = True

    def parameters(self) -> list[torch.Tensor]:
        return [p.to_local().clone() for p in self.model.parameters()]

    @property
    def is_driven(self) -> bool:
        return any(torch_private.replaced_attributes(state) for _, state in torch_private.states(self.model))


def whole(here: Rank) -> tuple[dict[str, int], list[float | None], float, bool]:
    job = Job(here)
    outcome, is_ended = measured(job.train)
    assert (outcome.error, outcome.problem, is_ended) == (None, "", True)
    assert job.has_cleaned_up
    assert not job.is_driven
    result = outcome.result
    assert result is not None
    assert job.steps == expected_steps(3)
    assert (result.world_size, result.device, result.backend) == (4, "cpu", "gloo")
    assert "Net of 4 modules" in result.model
    assert "mesh (2, 2)" in result.model
    for row in result.rows:
        for sample in row.samples:
            assert (sample.backward_s is None) is (row.name == STOCK)
            assert sample.device_bytes is None
            if row.name != STOCK:
                assert 0 < sample.backward_s < sample.step_s
                assert sample.exposed_s >= 0
                assert sample.peak_bytes > 0
    plain = Job(here)
    plain.train(job.steps)
    is_undisturbed = all(torch.equal(a, b) for a, b in zip(job.parameters(), plain.parameters(), strict=True))
    return steps_of(result), [row.gradient_difference for row in result.rows], result.rows[1].step_s, is_undisturbed


def test_every_row_has_its_steps_and_training_is_not_disturbed(worlds: Worlds) -> None:
    found = worlds.of(4).run(whole)
    assert found[0] == (dict.fromkeys((STOCK, *SCHEDULES), 3), [0.0, 0.0, 0.0], found[0][2], True)
    assert all(of_rank == found[0] for of_rank in found)


def attaches_itself(here: Rank, schedule: str) -> tuple[dict[str, int], tuple[str, ...], list[str]]:
    job = Job(here)
    shown: dict[str, None] = {}

    def work() -> None:
        with commplan.attach(job.model, schedule) as attachment:
            assert isinstance(attachment, Attachment)
            assert attachment.plan.schedule == schedule
            assert attachment.stats() == {}
            with pytest.raises(ExecutionError, match="runs stock FSDP2"):
                attachment.report()
            for _ in range(1000):
                job.step()
                if attachment.last_backward is not None:
                    shown[attachment.plan.schedule] = None
                    assert attachment.stats()["commplan/backward_s"] > 0
                    assert attachment.report(local=True).schedule == attachment.plan.schedule

    outcome, is_ended = measured(work)
    assert is_ended
    assert not job.is_driven
    assert outcome.result is not None
    return steps_of(outcome.result), outcome.result.notes, list(shown)


@pytest.mark.parametrize("schedule", ["pipelined_allreduce", SCHEDULES[0]])
def test_a_script_that_attaches_a_schedule_itself(worlds: Worlds, schedule: str) -> None:
    (steps, notes, shown), *_ = worlds.of(4).run(attaches_itself, schedule=schedule)
    rows = [STOCK, *SCHEDULES] + ([] if schedule in SCHEDULES else [f"{schedule} (the script's)"])
    assert steps == dict.fromkeys(rows, 3)
    assert set(shown) == {*SCHEDULES, schedule}
    assert notes == (f"the script attaches {schedule} itself: here that only adds it to the table",)


@dataclass(frozen=True)
class Refusing(Candidate):
    """Is refused on one rank."""

    rank: int = 0

    def attach(self, model: nn.Module) -> Attachment:
        if torch.distributed.get_rank() == self.rank:
            raise AttachError("this rank does not like it")
        return super().attach(model)


@dataclass(frozen=True)
class Wrong(Candidate):
    """Gives other gradients."""

    def attach(self, model: nn.Module) -> Attachment:
        last = list(model.parameters())[-1]
        last.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().mul_(1.01))
        return super().attach(model)


def refused(here: Rank) -> tuple[dict[str, int], list[str], list[float | None]]:
    unordered = (
        "version: 1\nname: unordered\nsummary: s\npost_backward:\n  - RS_n: {after: compute_n}\n  - AR_n\n"
        "root:\n  - apply_n: {after: AR_n}\n"
    )
    ready = candidates(SCHEDULES[:1])[0]
    options = commplan.Options(timeout_s=2)
    others = (
        Candidate("unordered", language.parse(unordered)),
        Refusing("on one rank", ready.spec, {}, options, rank=2),
        Wrong("wrong", ready.spec, {}, options),
    )
    job = Job(here)
    outcome, is_ended = measured(job.train, (ready, *others))
    assert is_ended
    assert not job.is_driven
    result = outcome.result
    assert result is not None
    assert result.is_comparison
    rows = result.rows
    return steps_of(result), [row.refusal for row in rows], [row.gradient_difference for row in rows]


def test_what_is_refused_on_any_rank_is_left_out_on_all_and_wrong_gradients_are_seen(worlds: Worlds) -> None:
    found = worlds.of(4).run(refused)
    assert all(of_rank == found[0] for of_rank in found)
    steps, refusals, differences = found[0]
    assert steps == {STOCK: 3, SCHEDULES[0]: 3, "unordered": 0, "on one rank": 0, "wrong": 3}
    assert refusals[:2] == ["", ""]
    assert "CP2" in refusals[2]
    assert refusals[3] == "this rank does not like it"
    assert differences[:4] == [0.0, 0.0, None, None]
    assert differences[4] is not None
    assert 0 < differences[4] < 0.02


def all_refused(here: Rank) -> Result | None:
    job = Job(here)
    job.model.set_all_reduce_hook(lambda grad: None)
    outcome, is_ended = measured(job.train)
    assert is_ended
    assert job.steps == OPENING_STEPS
    return outcome.result


def test_where_every_schedule_is_refused_the_script_ends_at_once(worlds: Worlds) -> None:
    for result in worlds.of(4).run(all_refused):
        assert not result.is_comparison
        assert all("all-reduce hook" in row.refusal for row in result.rows[1:])


def unlike(here: Rank) -> str:
    outcome, is_ended = measured(Job(here).train, candidates(SCHEDULES[: 1 + here.rank % 2]))
    assert not is_ended
    return str(outcome.error)


def test_ranks_that_were_started_unlike(worlds: Worlds) -> None:
    for error in worlds.of(4).run(unlike):
        assert "ranks measure different schedules" in error


def ends(here: Rank, num_steps: int, raises: bool) -> tuple[str, str, dict[str, int]]:
    job = Job(here)

    def work() -> None:
        job.train(num_steps)
        if raises:
            raise ValueError("the script's own")

    outcome, is_ended = measured(work, candidates(SCHEDULES[:1]))
    assert not is_ended
    assert not job.is_driven
    return repr(outcome.error), outcome.problem, {} if outcome.result is None else steps_of(outcome.result)


ONE_ROUND = expected_steps(2, 2)


@pytest.mark.parametrize(
    ("num_steps", "problem", "steps"),
    [
        (0, "no model that", {}),
        (1, "let it take more", {}),
        (ONE_ROUND - 1, "", {STOCK: 2, SCHEDULES[0]: 0}),
        (ONE_ROUND, "", {STOCK: 2, SCHEDULES[0]: 2}),
    ],
)
def test_a_script_that_ends_early_leaves_what_was_measured(
    worlds: Worlds, num_steps: int, problem: str, steps: dict[str, int]
) -> None:
    for raises in (False, True) if num_steps == ONE_ROUND else (False,):
        for error, told, counted in worlds.of(4).run(ends, num_steps=num_steps, raises=raises):
            assert error == ('ValueError("the script\'s own")' if raises else "None")
            assert problem in told
            assert bool(problem) is bool(told)
            assert counted == steps


class Wrapper(nn.Module):
    """A loss around the model, beside a teacher that is sharded too and larger."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student = student
        self.teachers = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teachers[0](x)
        return (self.student(x) - target).square().sum()


def beside_others(here: Rank, attaches: bool) -> tuple[str, tuple[str, ...]]:
    """What is measured of a script with more than one model, and with two optimizers for one of them."""
    mesh = here.mesh((2, 2))
    student = models.shard(models.Net(), mesh)
    teacher = models.shard(models.Mlps((64, 64, 64), head=2), mesh).requires_grad_(attaches)
    model = Wrapper(student, teacher)
    parameters = list(student.parameters())
    optimizers = [torch.optim.SGD(of, lr=0.1) for of in (parameters[:2], parameters[2:], teacher.parameters())]

    def work() -> None:
        attached = [commplan.attach(*of) for of in ((student, "eager_apply"), (teacher, "blocking")) if attaches]
        for number in range(1000):
            with torch.no_grad():
                teacher(torch.ones(1, 4))
            model(torch.randn(3, 4)).backward()
            if attaches:
                teacher(torch.ones(1, 4)).sum().backward()
                assert (attached[1].last_backward is not None) is (number > 0)
                assert attached[1].plan.schedule == "blocking"
            for optimizer in optimizers:
                optimizer.step()

    outcome, is_ended = measured(work, candidates(SCHEDULES[:1]), num_steps=1)
    assert outcome.error is None, outcome.error
    assert is_ended
    assert not any(torch_private.replaced_attributes(state) for _, state in torch_private.states(teacher))
    assert outcome.result is not None
    assert outcome.result.is_comparison
    return outcome.result.model, outcome.result.notes


def test_the_model_is_found_beside_others(worlds: Worlds) -> None:
    for model, notes in worlds.of(4).run(beside_others, attaches=False):
        assert model.startswith("Net of 4 modules")
        assert notes == ()


def test_another_model_keeps_the_schedule_that_the_script_attaches_to_it(worlds: Worlds) -> None:
    for model, notes in worlds.of(4).run(beside_others, attaches=True):
        assert model.startswith("Net of 4 modules")
        assert notes[0] == "another model, Mlps, has the schedule that the script attaches to it"


def steps_in_backward(here: Rank) -> tuple[str, str]:
    model = models.shard(models.Net(), here.mesh((2, 2)))
    of = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in of:
        p.register_post_accumulate_grad_hook(lambda p: of[p].step())

    def work() -> None:
        for _ in range(10):
            model(torch.randn(3, 4)).sum().backward()

    outcome, is_ended = measured(work)
    assert not is_ended
    return type(outcome.error).__name__, str(outcome.error)


def test_an_optimizer_that_steps_inside_backward(worlds: Worlds) -> None:
    with worlds.thrown_away(4) as world:
        for kind, message in world.run(steps_in_backward):
            assert kind == "AttachError"
            assert "inside backward" in message


def no_optimizer(here: Rank) -> str:
    def work() -> None:
        model = models.shard(models.Net(), here.mesh((2, 2)))
        model(torch.randn(3, 4)).sum().backward()

    return measured(work)[0].problem


def test_a_script_whose_optimizer_is_its_own(worlds: Worlds) -> None:
    for problem in worlds.of(4).run(no_optimizer):
        assert "no optimizer of torch.optim" in problem


def built_in(here: Rank) -> dict[str, Any]:
    outcome, is_ended = measured(lambda: train(Size(2, 16, 1, 8)), checks_gradients=False, num_steps=1)
    assert is_ended
    assert outcome.result is not None
    return outcome.result.to_dict()


def test_the_built_in_model(worlds: Worlds) -> None:
    found = worlds.of(4).run(built_in)
    assert all(of_rank == found[0] for of_rank in found)
    assert found[0]["model"].startswith("Transformer of 3 modules")
    assert "mesh (2, 2)" in found[0]["model"]
    assert [row["gradient_difference"] for row in found[0]["rows"]] == [None] * 3


@pytest.mark.parametrize(
    ("world_size", "ranks_of_host", "replicas"),
    [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 2), (8, 0, 2), (16, 8, 2), (32, 8, 4), (4, 1, 4), (10, 4, 2), (6, 6, 2)],
)
def test_default_replicas(world_size: int, ranks_of_host: int, replicas: int) -> None:
    assert default_replicas(world_size, ranks_of_host) == replicas
    assert world_size % replicas == 0
