"""Where a schedule leaves gathering to FSDP2, parameters are gathered in FSDP2's order and with its values."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

import commplan
from commplan.fsdp2 import driver, torch_unshard
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

WIDTHS = (3, 5, 6, 9, 11)


class TwoOutputs(nn.Module):
    """Its backward begins twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).tanh().chunk(2, dim=-1)


class Net(models.Mlps):
    """Blocks of different sizes, so that a size tells whose parameters are gathered; the last has two outputs."""

    def __init__(self) -> None:
        super().__init__(WIDTHS, head=7)
        self.b.append(TwoOutputs())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *blocks, last = self.b
        for block in blocks:
            x = x + block(x)
        one, other = last(x)
        return self.head(one * 2 + other.square())


@dataclass
class Seen:
    """What a backward did.

    Attributes:
        events: elements of each all-gather, and whether it was asked not to wait; the name of each block that begins backward.
        calls: of the device's streams and events, in turn.
        parameters: whole, by module.
        num_ours: all-gathers that commplan started.
    """

    events: list[Any] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    parameters: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    num_ours: int = 0

    @property
    def num_gathers(self) -> int:
        return sum(isinstance(event, tuple) for event in self.events)


class Noting:
    """An all-gather that notes its calls."""

    def __init__(self, original: Any, events: list[Any]) -> None:
        self.original = original
        self.events = events
        self.allocate = original.allocate

    def __call__(self, **kwargs: Any) -> Any:
        self.events.append((kwargs["output_tensor"].numel(), kwargs["async_op"]))
        return self.original(**kwargs)


class Logged:
    """A device's module, a stream or an event, which logs what is called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def _log(self, what: str, *others: Logged) -> None:
        self.calls.append(f"{self.name}.{what}({', '.join(one.name for one in others)})")

    def current_stream(self) -> Logged:
        return Logged("current", self.calls)

    @contextlib.contextmanager
    def stream(self, of: Logged) -> Iterator[None]:
        self.calls.append(f"enter {of.name}")
        yield
        self.calls.append(f"leave {of.name}")

    def Event(self) -> Logged:
        return Logged("event", self.calls)

    def record(self) -> None:
        self._log("record")

    def record_event(self) -> Logged:
        self._log("record_event")
        return Logged(f"event of {self.name}", self.calls)

    def wait_event(self, event: Logged) -> None:
        self._log("wait_event", event)

    def wait_stream(self, other: Logged) -> None:
        self._log("wait_stream", other)


@contextlib.contextmanager
def logged(groups: list[Any], calls: list[str]) -> Iterator[None]:
    """Log the calls of streams and events of these groups, in the order in which a device would see them."""
    device = Logged("device", calls)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(_fsdp_collectives, "_get_device_handle", lambda kind: device))
        for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"):
            stack.enter_context(patch.object(groups[0].comm_ctx, name, Logged(name, calls)))
        stack.enter_context(patch.object(groups[0].comm_ctx, "device_handle", device))
        for group in groups:
            stack.enter_context(patch.object(group, "device_handle", device))
        yield


def backward(model: Any, rank: int, *, logs_streams: bool = False) -> Seen:
    """Forward, and what backward does; `logs_streams`: with what it calls of streams and events."""
    seen = Seen()
    groups = [module._get_fsdp_state()._fsdp_param_group for module in (*model.b, model)]
    begin = torch_unshard.Unshard._begin

    def counted(self: Any, async_op: bool) -> bool:
        has_begun = begin(self, async_op)
        seen.num_ours += has_begun
        return has_begun

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, grad: object) -> None:
            seen.events.append(name)
            seen.parameters[name] = [p.detach().clone() for p in module.parameters()]

        return hook

    with contextlib.ExitStack() as stack:
        for name, block in model.b.named_children():
            stack.callback(block.register_full_backward_pre_hook(look(name)).remove)
        for group in groups:
            stack.enter_context(patch.object(group, "_all_gather_comm", Noting(group._all_gather_comm, seen.events)))
        stack.enter_context(patch.object(torch_unshard.Unshard, "_begin", counted))
        loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()).sum()
        assert seen.num_ours == 0, "forward is FSDP2's"
        if logs_streams:
            stack.enter_context(logged(groups, seen.calls))
        seen.events.clear()
        loss.backward()
    return seen


def assert_alike(found: Seen, expected: Seen) -> None:
    assert found.events == expected.events
    assert found.parameters.keys() == expected.parameters.keys()
    for name, whole in expected.parameters.items():
        assert whole
        assert all(map(torch.equal, found.parameters[name], whole)), name


def split_along_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.size(1) % 2 == 0 else None


SHARDING: dict[str, dict[str, Any]] = {
    "plain": {},
    "parameters in bf16": {"bf16": True},
    "shards of columns": {"shard_placement_fn": split_along_columns},
    "whole after forward": {"reshard": False},
}


def sharded(here: Rank, shape: tuple[int, int] = (2, 2), **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return models.shard(Net(), here.mesh(shape), **kwargs)


def explicit(model: Any) -> None:
    model.set_modules_to_backward_prefetch([model.b[5], model.b[4]])
    model.b[5].set_modules_to_backward_prefetch([model.b[3]])
    model.b[4].set_modules_to_backward_prefetch([])


PREPARED: dict[str, Callable[[Any], None]] = {
    "as sharded": lambda model: None,
    "prefetch by hand": explicit,
    "async": lambda model: model._set_unshard_async_op(True),
}


def like_stock(here: Rank, kwargs: dict[str, Any], prepare: str) -> list[tuple[int, int]]:
    """All-gathers that commplan started, of how many, in each of three backwards."""
    stock, scheduled = sharded(here, **kwargs), sharded(here, **kwargs)
    PREPARED[prepare](stock)
    PREPARED[prepare](scheduled)
    counts = []
    with commplan.attach(scheduled, "overlapped_allreduce"):
        for _ in range(3):
            expected, found = (backward(model, here.rank) for model in (stock, scheduled))
            assert_alike(found, expected)
            counts.append((found.num_ours, found.num_gathers))
    assert backward(scheduled, here.rank).num_ours == 0
    return counts


@pytest.mark.parametrize("prepare", PREPARED)
@pytest.mark.parametrize("kwargs", SHARDING.values(), ids=SHARDING.keys())
def test_the_same_all_gathers_with_the_same_values(worlds: Worlds, kwargs: dict[str, Any], prepare: str) -> None:
    if "shard_placement_fn" in kwargs and prepare != "as sharded":
        pytest.skip("how shards lie and when they are gathered have nothing to do with each other")
    num_gathers = 0 if kwargs.get("reshard") is False else len(WIDTHS) + 1
    assert worlds.of(4).run(like_stock, kwargs=kwargs, prepare=prepare) == [[(num_gathers, num_gathers)] * 3] * 4


def gathering(seen: Seen) -> list[str]:
    """What is called for the sake of gathering; stock FSDP2 has others besides, for its reduction."""
    return [call for call in seen.calls if "all_gather" in call or call.startswith("event")]


def on_streams(here: Rank, prepare: str) -> list[tuple[list[str], list[str]]]:
    """In two backwards, what stock FSDP2 and a schedule call of streams and events."""
    stock, scheduled = sharded(here), sharded(here)
    PREPARED[prepare](stock)
    PREPARED[prepare](scheduled)
    with commplan.attach(scheduled, "overlapped_allreduce"):
        seen = [[backward(model, here.rank, logs_streams=True) for model in (stock, scheduled)] for _ in range(2)]
    return [(gathering(expected), gathering(found)) for expected, found in seen]


@pytest.mark.parametrize("prepare", PREPARED)
def test_the_same_order_on_streams(worlds: Worlds, prepare: str) -> None:
    for of_rank in worlds.of(4).run(on_streams, prepare=prepare):
        for expected, found in of_rank:
            assert len(expected) > 2 * len(WIDTHS)
            assert found == expected


def left_to_fsdp2(here: Rank, why: str) -> tuple[int, int]:
    """All-gathers in backward that commplan started, of how many."""
    shape, kwargs = ((1, 4), {"reshard": 2}) if why == "shards of fewer ranks" else ((2, 2), {})
    stock, scheduled = sharded(here, shape, **kwargs), sharded(here, shape, **kwargs)
    with contextlib.ExitStack() as stack:
        if why == "a wrapped method":
            original = _fsdp_param_group.FSDPParamGroup.unshard
            wrapped = functools.wraps(original)(lambda self, async_op=False: original(self, async_op))
            stack.enter_context(patch.object(_fsdp_param_group.FSDPParamGroup, "unshard", wrapped))
        stack.enter_context(commplan.attach(scheduled, "overlapped_allreduce"))
        if why == "another function in FSDP2":
            other = functools.partial(_fsdp_collectives.foreach_all_gather)
            stack.enter_context(patch.object(_fsdp_param_group, "foreach_all_gather", other))
        expected, found = (backward(model, here.rank) for model in (stock, scheduled))
        assert_alike(found, expected)
        return found.num_ours, found.num_gathers


@pytest.mark.parametrize("why", ["shards of fewer ranks", "a wrapped method", "another function in FSDP2"])
def test_what_only_fsdp2_knows_is_left_to_it(worlds: Worlds, why: str) -> None:
    for num_ours, num_gathers in worlds.of(4).run(left_to_fsdp2, why=why):
        assert num_ours == 0
        assert num_gathers > 0


def replaced(here: Rank) -> list[str]:
    """Somebody's own method stays, and is called."""
    model = sharded(here)
    group = model.b[2]._get_fsdp_state()._fsdp_param_group
    calls: list[str] = []
    original = group.unshard

    def own(async_op: bool = False) -> None:
        calls.append("own")
        original(async_op)

    group.unshard = own
    with commplan.attach(model, "overlapped_allreduce"):
        backward(model, here.rank)
        assert group.unshard is own
    assert group.unshard is own
    return calls


def test_a_method_that_somebody_replaced_stays(worlds: Worlds) -> None:
    for calls in worlds.of(4).run(replaced):
        # In forward, before the module that comes first in backward, and in its own.
        assert calls == ["own"] * 3


def restored(here: Rank) -> None:
    model = sharded(here)
    states = [module._get_fsdp_state() for module in (*model.b, model)]
    owners = [*states, *(state._fsdp_param_group for state in states)]
    before = [set(vars(owner)) for owner in owners]
    with commplan.attach(model, "overlapped_allreduce"):
        assert all("unshard" in vars(state._fsdp_param_group) for state in states)
    assert [set(vars(owner)) for owner in owners] == before


def test_detach_takes_it_back(worlds: Worlds) -> None:
    worlds.of(4).run(restored)


def in_a_compiled_step(here: Rank, wrapped: str) -> dict[str, list[bool]]:
    """Whether torch.compile traces the hooks of a backward that it runs itself, each time they run."""
    seen: dict[str, list[bool]] = {"before": [], "after": [], "wrapped": []}

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def noted(*args: Any) -> Any:
            seen[name].append(get_eval_frame_callback() is not None)
            return original(*args)

        return noted

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    torch._dynamo.reset()
    model = sharded(here)
    with contextlib.ExitStack() as stack:
        if wrapped:
            original = _fsdp_state.FSDPState._pre_backward
            if wrapped == "without guard":
                original = inspect.unwrap(original)
            stack.enter_context(patch.object(_fsdp_state.FSDPState, "_pre_backward", noting("wrapped", original)))
        stack.enter_context(patch.object(driver.Driver, "_need", noting("before", driver.Driver._need)))
        stack.enter_context(patch.object(driver.Driver, "_complete", noting("after", driver.Driver._complete)))
        stack.enter_context(commplan.attach(model, "overlapped_allreduce"))
        step(torch.ones(3, 4))
    return seen


@pytest.mark.parametrize("wrapped", ["", "with its guard", "without guard"])
def test_torch_compile_keeps_out_of_hooks(worlds: Worlds, wrapped: str) -> None:
    """FSDP2's own, and one that somebody put in its place."""
    for seen in worlds.of(4).run(in_a_compiled_step, wrapped=wrapped):
        assert seen["before"]
        assert seen["after"]
        assert not any(seen["before"] + seen["after"])
        assert bool(seen["wrapped"]) is bool(wrapped), "what somebody put around FSDP2's hook is called"


def old_shards(here: Rank) -> int:
    """Shards that are alive after they were replaced."""
    model = sharded(here)
    with commplan.attach(model, "overlapped_allreduce"):
        backward(model, here.rank)
        old = [weakref.ref(p._local_tensor.untyped_storage()) for p in model.parameters()]
        model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)
        gc.collect()
        return sum(ref() is not None for ref in old)


def test_shards_that_were_replaced_are_not_kept(worlds: Worlds) -> None:
    assert worlds.of(4).run(old_shards) == [0] * 4


def ranges(here: Rank) -> tuple[list[str], list[str]]:
    """Ranges of FSDP2's gathering, in stock FSDP2 and under a schedule."""
    stock, scheduled = sharded(here), sharded(here)
    found = []
    with commplan.attach(scheduled, "overlapped_allreduce"):
        for model in (stock, scheduled):
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                backward(model, here.rank)
            names = [event.name for event in profiler.events()]
            found.append([name for name in names if name.startswith(("FSDP::all_gather", "FSDP::pre_backward", "FSDP::back"))])
    return found[0], found[1]


def test_a_profiler_sees_the_same(worlds: Worlds) -> None:
    for stock, scheduled in worlds.of(4).run(ranges):
        assert scheduled == stock
        assert "FSDP::backward_prefetch for b.3" in stock
