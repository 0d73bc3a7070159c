"""What attach refuses: with a clear message, on every rank, and without touching the model."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commplan
from commplan.errors import AttachError, CommplanError, RankMismatchError, ScheduleError
from commplan.fsdp2 import Options, torch_private, torch_releases
from commplan.fsdp2 import attachment as attach_module
from tests.worlds import features, models, parity
from tests.worlds.world import Rank, Worlds

FN = parity.PROBLEMS["FN"]

HEAD = "version: 1\nname: mine\nsummary: One of mine.\n"
BAD = HEAD + "post_backward:\n  - AR_n: {after: compute_n}\n  - RS_n: {after: AR_n}\n"
REDUCE = "post_backward:\n  - RS_n: {after: compute_n}\n"
APPLY = "root:\n  - apply_n: {after: AR_n}\n"


class Snapshot:
    """All that attach might change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = self.take()

    def take(self) -> list[Any]:
        found: list[Any] = [len(dist.distributed_c10d._world.pg_map), len(dist.distributed_c10d._world.pg_names)]
        for name, module in self.model.named_modules():
            found.append((name, type(module), dict(module._forward_pre_hooks), dict(module._forward_hooks)))
            found.append({k: id(v) for k, v in vars(module).items()})
        for _, state in torch_private.states(self.model):
            found.append({k: id(v) for k, v in vars(state).items() if "Counter" not in k})
            found.extend({k: id(v) for k, v in vars(group).items()} for group in torch_private.groups(state))
        return found

    def assert_same(self) -> None:
        assert self.take() == self.before


def trains_as_stock(here: Rank, model: nn.Module) -> None:
    """The model (of `fresh`) still is one of stock FSDP2."""
    stock = list(parity.train(fresh(here), FN, here.rank, [parity.PLAIN, parity.NO_SYNC]))
    for number, grads in enumerate(parity.train(model, FN, here.rank, [parity.PLAIN, parity.NO_SYNC])):
        parity.assert_equal(grads, stock[number], "after a refusal")


def fresh(here: Rank) -> nn.Module:
    return parity.build(FN, here, (2, 2), {})


def refused(call: Callable[[], Any], kind: type[Exception] = CommplanError) -> str:
    """The message of the refusal that `call` ends in."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# The same on every rank.


def schedule_refused(here: Rank, schedule: str, params: dict[str, int]) -> tuple[str, str]:
    model = fresh(here)
    snapshot = Snapshot(model)
    try:
        commplan.attach(model, schedule, **params)
    except CommplanError as error:
        snapshot.assert_same()
        trains_as_stock(here, model)
        return type(error).__name__, str(error)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("schedule", "params", "kind", "said"),
    [
        (BAD, {}, ScheduleError, [r"<text>:5:", "CP2"]),
        (HEAD + "post_backward:\n  - wiat: RS_n\n", {}, ScheduleError, [r"<text>:5:", "CP0"]),
        ("pipelined_allreduc", {}, CommplanError, ["pipelined_allreduce"]),
        ("delayed_allreduce", {"k": 0}, CommplanError, ["k", "1"]),
        ("delayed_allreduce", {"k": 33}, CommplanError, ["k", "32"]),
        ("delayed_allreduce", {"j": 1}, CommplanError, ["j", "k"]),
    ],
)
def test_schedules(worlds: Worlds, schedule: str, params: dict[str, int], kind: type, said: list[str]) -> None:
    for name, message in worlds.of(4).run(schedule_refused, schedule=schedule, params=params):
        assert name == kind.__name__
        for pattern in said:
            assert re.search(pattern, message), message


def not_sharded(here: Rank) -> str:
    return refused(lambda: commplan.attach(models.Net(), "blocking"), AttachError)


def head_not_sharded(here: Rank) -> str:
    model = models.Net()
    for block in model.b:
        fully_shard(block, mesh=here.mesh((2, 2)))
    snapshot = Snapshot(model)
    said = {refused(lambda s=schedule: commplan.attach(model, s), AttachError) for schedule, _ in parity.LIBRARY}  # type: ignore[misc]
    snapshot.assert_same()
    (message,) = said
    return message


def attached_twice(here: Rank) -> str:
    model = fresh(here)
    with commplan.attach(model, "blocking"):
        snapshot = Snapshot(model)
        message = refused(lambda: commplan.attach(model, "pipelined_allreduce"), AttachError)
        snapshot.assert_same()
    trains_as_stock(here, model)
    return message


def unknown_torch(here: Rank) -> str:
    model = fresh(here)
    snapshot = Snapshot(model)
    with patch.object(torch_releases, "RELEASES", {"2.99": "0" * 16}):
        message = refused(lambda: commplan.attach(model, "blocking"), AttachError)
    snapshot.assert_same()
    trains_as_stock(here, model)
    return message


def all_reduce_hook(here: Rank) -> str:
    model = fresh(here)
    model.b[1].set_all_reduce_hook(lambda shard: None)  # type: ignore[index,operator]
    snapshot = Snapshot(model)
    message = refused(lambda: commplan.attach(model, "blocking"), AttachError)
    snapshot.assert_same()
    return message


def tied_over_two_groups(here: Rank) -> str:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=here.mesh((2, 2)))
    fully_shard(model, mesh=here.mesh((2, 2)))
    return refused(lambda: commplan.attach(model, "blocking"), AttachError)


def part_of_a_model(here: Rank) -> str:
    model = fresh(here)
    model(FN.batch(here.rank, 0))
    return refused(lambda: commplan.attach(model.b[0], "blocking"), AttachError)  # type: ignore[index]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (not_sharded, ["fully_shard"]),
        pytest.param(head_not_sharded, ["head.weight", "no op"], marks=pytest.mark.report("AReaL#313")),
        (attached_twice, ["already", "detach"]),
        (unknown_torch, [re.escape(torch.__version__), "2.99"]),
        (all_reduce_hook, ["b.1", "set_all_reduce_hook"]),
        (part_of_a_model, ["part of a sharded model"]),
        pytest.param(tied_over_two_groups, ["weight"], marks=[features.remembered_ties, pytest.mark.report("pytorch#176225")]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_models(worlds: Worlds, case: Callable[[Rank], str], said: list[str]) -> None:
    for message in worlds.of(4).run(case):
        for pattern in said:
            assert re.search(pattern, message), message


def test_not_initialised() -> None:
    with pytest.raises(AttachError, match="init_process_group"):
        commplan.attach(nn.Linear(2, 2), "blocking")


# Other on one rank.

ODD = 2


OTHER_BUILD = f"{torch.__version__}.7"


def odd_rank(here: Rank, what: str) -> str:
    model = fresh(here)
    if what == "model" and here.rank == ODD:
        torch.manual_seed(0)
        model = models.Net()
        model.head = nn.Linear(4, 3, bias=False)
        model = models.shard(model, here.mesh((2, 2)))
    snapshot = Snapshot(model)
    is_odd = here.rank == ODD
    schedule: Any = "pipelined_allreduce" if is_odd and what == "schedule" else "delayed_allreduce"
    params = {"k": 3 if is_odd and what == "params" else 2} if schedule == "delayed_allreduce" else {}
    version = OTHER_BUILD if is_odd and what == "torch" else torch.__version__
    kind = RankMismatchError
    if what == "refusal" and is_odd:
        params, kind = {"k": 1000}, CommplanError
    options = Options(timeout_s=60)
    if what == "lanes" and is_odd:
        options = Options(timeout_s=60, make_lanes=_no_lanes)
        kind = ZeroDivisionError  # type: ignore[assignment]
    with patch.object(attach_module.torch, "__version__", version):
        message = refused(lambda: commplan.attach(model, schedule, options=options, **params), kind)
    snapshot.assert_same()
    if what != "model":
        trains_as_stock(here, model)
    return message


def _no_lanes(device: torch.device, timeout_s: float) -> Any:
    return 1 / 0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("schedule", ["the schedule", "rank(s) 2 have", "rank(s) 0, 1, 3 have", "pipelined_allreduce", "delayed_allreduce"]),
        ("params", ["params", "rank(s) 2 have 'k = 3'", "rank(s) 0, 1, 3 have 'k = 2'"]),
        ("torch", ["torch", f"rank(s) 2 have '{OTHER_BUILD}'", torch.__version__]),
        ("model", ["module table", "rank(s) 2 have", "rank(s) 0, 1, 3 have"]),
        ("refusal", ["rank(s) 2", "1000"]),
        ("lanes", ["rank(s) 2", "ZeroDivisionError"]),
    ],
)
def test_one_rank_has_something_else(worlds: Worlds, what: str, said: list[str]) -> None:
    for rank, message in enumerate(worlds.of(4).run(odd_rank, what=what)):
        if rank != ODD or what not in ("refusal", "lanes"):
            for part in said:
                assert part in message, message


def one_stays_away(here: Rank) -> tuple[str, float]:
    model = fresh(here)
    if here.rank == ODD:
        return "", 0.0
    snapshot = Snapshot(model)
    begin_s = time.monotonic()
    message = refused(lambda: commplan.attach(model, "blocking", options=Options(timeout_s=3)), RankMismatchError)
    snapshot.assert_same()
    return message, time.monotonic() - begin_s


def test_one_rank_never_attaches(worlds: Worlds) -> None:
    with worlds.thrown_away(4) as world:
        for rank, (message, elapsed_s) in enumerate(world.run(one_stays_away)):
            if rank != ODD:
                assert "rank(s) 2 did not" in message
                assert 3 <= elapsed_s < 30
