"""Ranks that run apart: a named error on all of them, never a mix of gradients, and no process that gloo ends."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commplan
from commplan.errors import AttachError, DivergenceError, ExecutionError
from commplan.execute.workers import WorkerLanes
from commplan.fsdp2 import Options
from tests.worlds import models, parity, reference
from tests.worlds.lazy import LazyLanes
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]
TIMEOUT_S = 60.0
SHORT_S = 5.0
SOME = ("blocking", "pipelined_allreduce", "fsdp2_native", "eager_apply")


class Branches(nn.Module):
    """Blocks of different sizes beside each other, each sharded; a forward sums those named in `uses`."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(nn.Linear(4, size) for size in (4, 8, 12))
        self.head = nn.Linear(4, 4)
        self.uses: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        return sum((self.b[i](x).sum() for i in self.uses), torch.zeros(()))


def make_branches(here: Rank) -> Any:
    torch.manual_seed(0)
    return models.shard(Branches(), here.mesh((2, 2)), reshard=False)


def diverges(model: nn.Module, backward: Callable[[], None], **attach: Any) -> str:
    """The message of the DivergenceError in which `backward` ends on this rank; nothing is left in .grad."""
    with commplan.attach(model, **attach) as attachment:
        with pytest.raises(DivergenceError) as caught:
            backward()
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(ExecutionError, match="earlier backward failed"):
            backward()
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ExecutionError, match="earlier backward failed"):
            optimizer.step()
        attachment.detach()
        optimizer.step()
        dist.barrier()
    return str(caught.value)


def different_parameters(here: Rank, schedule: str, uses: list[str], rank_checks: str) -> str:
    model = models.pair(here.mesh((2, 2)))
    model.uses = uses[here.rank]

    def backward() -> None:
        model(FN.batch(here.rank, 0)).sum().backward()

    options = Options(timeout_s=TIMEOUT_S)
    return diverges(model, backward, schedule=schedule, options=options, rank_checks=rank_checks)


@pytest.mark.report("pytorch#158719", "pytorch#170667", "torchtitan#2747")
@pytest.mark.parametrize("schedule", SOME)
@pytest.mark.parametrize("uses", [["a", "ac", "a", "ac"], ["ac", "ac", "ac", "c"]])
def test_always_finds_different_sizes_before_gloo_does(worlds: Worlds, schedule: str, uses: list[str]) -> None:
    """Every rank names the op, the module, its group, and which ranks have what."""
    found = worlds.of(4).run(different_parameters, schedule=schedule, uses=uses, rank_checks="always")
    for rank, message in enumerate(found):
        group = "[0, 1]" if rank < 2 else "[2, 3]"
        assert f"RS_0 of module '(root)' on the group of ranks {group} did not begin" in message
        odd = "rank(s) 1, 3" if uses[1] != uses[2] else "rank(s) 3"
        assert re.search(rf"{re.escape(odd)} have .*parameters \(.*\) in torch.float32, all-reduce True", message), message


@pytest.mark.report("pytorch#75902", "pytorch#75373")
@pytest.mark.parametrize("rank_checks", ["backward", "always"])
def test_equal_sizes_of_different_parameters(worlds: Worlds, rank_checks: str) -> None:
    uses = ["a", "a", "c", "c"]
    found = worlds.of(4).run(different_parameters, schedule="pipelined_allreduce", uses=uses, rank_checks=rank_checks)
    for message in found:
        assert re.search(r"rank\(s\) 2, 3 have .*parameters \(2, 3\).* rank\(s\) 0, 1 have .*parameters \(0, 1\)", message)


class Unblocked(WorkerLanes):
    """As on a device: backward returns before the outcome of the rank check is known."""

    @property
    def blocks_host(self) -> bool:
        return False


def learns_later(here: Rank, comes_next: str) -> str:
    model = models.pair(here.mesh((2, 2)))
    model.uses = "aacc"[here.rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.to_local().clone() for p in model.parameters()]
    options = Options(timeout_s=TIMEOUT_S, make_lanes=lambda device, timeout_s: Unblocked(timeout_s))

    def goes_on() -> None:
        model(FN.batch(here.rank, 0)).sum().backward()
        if comes_next == "step":
            optimizer.step()
        # A forward looks, but does not wait.
        while comes_next == "forward":
            model(FN.batch(here.rank, 0))
            time.sleep(0.01)

    with commplan.attach(model, "pipelined_allreduce", options=options):
        with pytest.raises(ExecutionError, match="ranks disagree on backward 1") as caught:
            goes_on()
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(p.to_local(), b) for p, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("comes_next", ["step", "forward"])
def test_where_backward_does_not_wait_the_next_call_raises(worlds: Worlds, comes_next: str) -> None:
    # A forward that some ranks begin leaves an all-gather on the groups of the mesh.
    with worlds.thrown_away(4) as world:
        for message in world.run(learns_later, comes_next=comes_next):
            assert "rank(s) 2, 3 have" in message


def different_modules(here: Rank, uses: list[tuple[int, ...]]) -> str:
    """Parameters stay gathered, since FSDP2's own all-gathers need equal forwards on the ranks of a shard group."""
    model = make_branches(here)
    for module in (model, *model.b):
        module.unshard()
    model.uses = uses[here.rank]

    def backward() -> None:
        model(FN.batch(here.rank, 0)).backward()

    options = Options(timeout_s=TIMEOUT_S)
    return diverges(model, backward, schedule="pipelined_allreduce", options=options, rank_checks="always")


@pytest.mark.parametrize("skips", [0, 1, 2])
def test_always_finds_different_modules(worlds: Worlds, skips: int) -> None:
    """Rank 1 leaves out one block: the first, the last, one between."""
    rest = tuple(i for i in range(3) if i != skips)
    for message in worlds.of(4).run(different_modules, uses=[(0, 1, 2), rest, (0, 1, 2), (0, 1, 2)]):
        assert re.search(r"rank\(s\) 1 have .* where rank\(s\) 0, 2, 3 have", message), message


def different_flags(here: Rank, rank_checks: str) -> str:
    """Rank 2 reduces only over its shard group."""
    model = models.shard(models.fk(3), here.mesh((2, 2)))
    parity.set_flags(model, {"all_reduce": here.rank != 2})

    def backward() -> None:
        model(torch.zeros(1, requires_grad=True)).sum().backward()

    options = Options(timeout_s=TIMEOUT_S)
    return diverges(model, backward, schedule="pipelined_allreduce", options=options, rank_checks=rank_checks)


@pytest.mark.parametrize("rank_checks", ["backward", "always"])
def test_different_flags(worlds: Worlds, rank_checks: str) -> None:
    """The default finds out at the start of root, though rank 0 waits in an all-reduce to which rank 2 does not come."""
    for message in worlds.of(4).run(different_flags, rank_checks=rank_checks):
        assert re.search(r"rank\(s\) 2 have .*all-reduce False.* where rank\(s\) 0, 1, 3 .*all-reduce True", message), message


def counts_apart(here: Rank, counts: list[int]) -> str:
    """Some microbatches without sync, then one with; replicas differ, so that FSDP2's all-gathers fit."""
    model = models.shard(models.fk(3), here.mesh((2, 2)))

    def backward() -> None:
        for _ in range(counts[here.rank]):
            parity.set_flags(model, {"sync": False})
            model(torch.zeros(1, requires_grad=True)).sum().backward()
        parity.set_flags(model, {})
        model(torch.zeros(1, requires_grad=True)).sum().backward()

    return diverges(model, backward, schedule="pipelined_allreduce", options=Options(timeout_s=TIMEOUT_S))


@pytest.mark.report("unequal numbers of microbatches")
def test_different_numbers_of_microbatches(worlds: Worlds) -> None:
    for message in worlds.of(4).run(counts_apart, counts=[2, 2, 3, 3]):
        assert re.search(r"'backward (3|4)' where .* have 'backward (4|3)'", message), message


def one_more_step(here: Rank) -> str:
    """Replica 1 goes on while replica 0 is through."""
    model = models.shard(models.fk(3), here.mesh((2, 2)))
    said = ""
    attachment = commplan.attach(model, "pipelined_allreduce", options=Options(timeout_s=SHORT_S))
    for step in range(2 if here.rank >= 2 else 1):
        try:
            model(torch.zeros(1, requires_grad=True)).sum().backward()
        except ExecutionError as error:
            assert step == 1
            said = str(error)
    dist.barrier()
    attachment.detach()
    return said


def test_one_step_more_on_some_ranks(worlds: Worlds) -> None:
    found = worlds.of(4).run(one_more_step)
    assert found[:2] == ["", ""]
    for message in found[2:]:
        assert re.search(r"AR_\d of module '\d' on the group of ranks \[\d, \d\]", message), message
        assert "0, 1 after backward 1" in message


# Where ranks agree.


def agree_always(here: Rank) -> None:
    """All schedules, modules that are used on no rank, twice, in another order, with microbatches that accumulate."""
    for name in ("FN", "FN unused", "FN twice", "FN reversed", "FN plain input"):
        problem = parity.PROBLEMS[name]
        steps = [parity.NO_ALL_REDUCE, parity.LAST_BACKWARD] if name != "FN" else [parity.NO_SYNC, parity.NO_ALL_REDUCE]
        expected = list(parity.train(parity.build(problem, here, (2, 2), {}), problem, here.rank, steps))
        for lanes in (None, LazyLanes) if name in ("FN", "FN twice") else (None,):
            options = parity.LAZY if lanes else Options(timeout_s=60)
            for schedule, params in parity.DISTINCT if name == "FN" and not lanes else parity.DIFFERENT:
                model = parity.build(problem, here, (2, 2), {})
                with commplan.attach(model, schedule, options=options, rank_checks="always", **params):
                    for number, grads in enumerate(parity.train(model, problem, here.rank, steps)):
                        parity.assert_equal(grads, expected[number], f"{name} under {schedule}, step {number}")


def test_always_changes_no_gradient(worlds: Worlds) -> None:
    worlds.of(4).run(agree_always)


def meshes_apart(here: Rank) -> None:
    """A model of modules over one and over two axes: all ranks of both take part in each check."""
    torch.manual_seed(0)
    model = models.fk(4)
    for i, block in enumerate(model):  # type: ignore[arg-type]
        mesh = here.mesh((2, 2)) if i % 2 else here.mesh((4,), ("shard",))
        fully_shard(block, mesh=mesh)
    with commplan.attach(fully_shard(model, mesh=here.mesh((2, 2))), "pipelined_allreduce", rank_checks="always"):
        ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
        assert reference.values(model) == [2.5, 5.0, 7.5, 10.0]


def test_always_on_mixed_meshes(worlds: Worlds) -> None:
    worlds.of(4).run(meshes_apart)


def users_collectives(here: Rank, rank_checks: str) -> None:
    """The user reduces on the mesh's own groups between microbatches, in hooks, and on all ranks."""
    mesh = here.mesh((2, 2))
    groups = [mesh.get_group("shard"), mesh.get_group("replicate"), dist.group.WORLD]
    sums: list[float] = []

    def reduce_all(*_: Any) -> None:
        for group in groups:
            mine = torch.ones(3)
            dist.all_reduce(mine, group=group)
            sums.append(mine[0].item())

    model = models.shard(models.fk(3), mesh)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce_all)
    for block in model:  # type: ignore[attr-defined]
        block.register_full_backward_hook(reduce_all)
    with commplan.attach(model, "overlapped_allreduce", rank_checks=rank_checks):
        for flags in parity.NO_ALL_REDUCE:
            parity.set_flags(model, flags)
            ((here.rank + 1) * model(torch.zeros(1, requires_grad=True))).sum().backward()
            reduce_all()
    assert reference.values(model) == [7.5, 15.0, 22.5]
    assert sums == [2.0, 2.0, 4.0] * (3 * 3 + 3 + 3)


@pytest.mark.report("collectives of the user between microbatches")
@pytest.mark.parametrize("rank_checks", ["off", "backward", "always"])
def test_collectives_of_the_user_on_the_groups_of_the_mesh(worlds: Worlds, rank_checks: str) -> None:
    worlds.of(4).run(users_collectives, rank_checks=rank_checks)


def wrong_word(here: Rank) -> str:
    with pytest.raises(AttachError) as caught:
        commplan.attach(models.shard(models.fk(1), here.mesh((2, 2))), "blocking", rank_checks="sometimes")  # type: ignore[arg-type]
    return str(caught.value)


def test_a_word_that_rank_checks_does_not_know(worlds: Worlds) -> None:
    for message in worlds.of(4).run(wrong_word):
        assert "'sometimes'" in message
        assert "'always'" in message
