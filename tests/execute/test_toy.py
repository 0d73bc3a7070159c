"""An HSDP that is not FSDP2, driven through the same interface; an executor without its safeguards must be noticed."""

from __future__ import annotations

import pytest
import torch

import commplan
from commplan.execute.executor import Executor
from commplan.execute.machinery import Machinery
from commplan.execute.memory import Memory
from commplan.execute.workers import WorkerLanes
from tests.execute import scenarios
from tests.execute.mutants import MUTANTS
from tests.execute.toy import Groups, ToyUnit, table
from tests.worlds import parity
from tests.worlds.lazy import LazyLanes, PoisonedMemory
from tests.worlds.world import Rank, Worlds

NUM_SCENARIOS = 120
SCHEDULES = (*parity.SCHEDULES, (parity.HOLDING, {"k": 2}))


def make_groups(here: Rank, shape: tuple[int, int]) -> dict[str, Groups]:
    mesh = here.mesh(shape)
    shard, replicate = mesh.get_group("shard"), mesh.get_group("replicate")
    own = ("replicate@own", here.mesh(shape, ("own replicate", "own shard")).get_group("own replicate"))
    return {
        "both": Groups(shard, replicate, (own,)),
        "shard": Groups(shard, None),
        "replicate": Groups(None, replicate, (own,)),
    }


def run_many(here: Rank, shape: tuple[int, int], seeds: range, lazy: bool) -> None:
    groups = make_groups(here, shape)
    for seed in seeds:
        scenario = scenarios.make(seed, SCHEDULES, groups)
        lanes = LazyLanes(60) if lazy else WorkerLanes(60)
        memory = PoisonedMemory() if lazy else Memory()
        problems = scenarios.run(scenario, here.rank, groups, lanes, memory)
        assert not problems, (scenario, problems)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_lazy_lanes(worlds: Worlds, shape: tuple[int, int]) -> None:
    worlds.of(4).run(run_many, shape=shape, seeds=range(NUM_SCENARIOS), lazy=True)


def test_workers(worlds: Worlds) -> None:
    worlds.of(4).run(run_many, shape=(2, 2), seeds=range(NUM_SCENARIOS // 4), lazy=False)


def first_noticed(here: Rank, mutant: str, seeds: range) -> list[str]:
    """What is wrong with a mutant in the first scenario in which something is."""
    groups = make_groups(here, (2, 2))
    with MUTANTS[mutant]():
        for seed in seeds:
            scenario = scenarios.make(seed, SCHEDULES, groups)
            try:
                problems = scenarios.run(scenario, here.rank, groups, LazyLanes(60), PoisonedMemory())
            except (AssertionError, KeyError) as error:
                problems = [repr(error)]
            if problems:
                return problems
    return []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_die(worlds: Worlds, mutant: str) -> None:
    found = worlds.of(4).run(first_noticed, mutant=mutant, seeds=range(NUM_SCENARIOS))
    assert all(found), found


def declared_after_abort(here: Rank) -> tuple[int, int]:
    """What a backward declares before and after one is aborted that adds partial sums of different parameters."""
    groups = make_groups(here, (1, 1))["both"]
    unit = ToyUnit("module", (5, 4), groups)
    whole = {0: torch.ones(5), 1: torch.ones(4)}
    executor = Executor(commplan.compile("blocking", table([unit])), [unit], Machinery(WorkerLanes(60), Memory(), None))

    def backward(*params: int, all_reduce: bool) -> None:
        unit.all_reduce = all_reduce
        executor.complete(0, unit.gradients({param: whole[param] for param in params}))

    def declared() -> int:
        backward(0, 1, all_reduce=True)
        executor.root()
        assert executor.last_report is not None
        return executor.last_report.declared_peak_bytes

    before = declared()
    backward(0, all_reduce=False)
    executor.root()
    backward(1, all_reduce=True)
    executor.abort()
    after = declared()
    executor.close()
    return before, after


def test_an_aborted_backward_leaves_nothing_to_declare(worlds: Worlds) -> None:
    [(before, after)] = worlds.of(1).run(declared_after_abort)
    assert after == before == 4 * (9 + 9)
