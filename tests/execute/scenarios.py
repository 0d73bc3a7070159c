"""Random backwards of a toy HSDP: modules that come out of order, twice, late or never, and partial sums of some parameters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commplan import compile  # noqa: A004
from commplan.execute.executor import Executor
from commplan.execute.lanes import Lanes
from commplan.execute.machinery import Machinery
from commplan.execute.memory import Memory
from commplan.ops import Kind
from tests.execute.toy import Groups, ToyUnit, table
from tests.mixtures import mixture

PRE_BACKWARD = """
version: 1
name: in_pre_backward
summary: All-reduce and apply before compute of the next module.
pre_backward:
  - wait: RS_<n-1>
  - AR_<n-1>: {after: RS_<n-1>}
  - wait: AR_<n-2>
  - apply_<n-2>: {after: AR_<n-2>}
post_backward:
  - RS_n: {after: compute_n}
"""

NUMELS = ((5, 4), (3,), (1, 7, 2), (8,))

DTYPES = ("fp16", "fp32")
"""On the wire; every sum in a scenario is a whole number that the narrower one holds."""


@dataclass(frozen=True)
class Event:
    """Gradients of some parameters of one module become complete."""

    module: int
    params: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    """One backward: `told_last` come while the executor collects; `all_reduce` is the flag of all modules.

    `raises_after`: it ends after so many events, and is followed by an abort.  `is_wide`: its gradients come in float64, of
    which the plan knows nothing.
    """

    events: tuple[Event, ...]
    told_last: tuple[Event, ...]
    all_reduce: bool
    raises_after: int | None = None
    is_wide: bool = False
    is_last: bool = True


@dataclass(frozen=True)
class Scenario:
    """Some backwards, the last of which leaves nothing unreduced; `axes` by module: "both", "shard" or "replicate".

    `waiting`: kinds of reductions that run in the last backward only.
    """

    schedule: str
    params: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    backwards: tuple[Backward, ...]
    waiting: frozenset[Kind] = frozenset()

    def keeps_whole(self, module: int) -> bool:
        """Whether gradients of a module wait for the last backward."""
        first = Kind.ALL_REDUCE if self.axes[module] == "replicate" else Kind.REDUCE_SCATTER
        return first in self.waiting

    def keeps_partial(self, module: int) -> bool:
        """Whether its reduced shard does."""
        return Kind.ALL_REDUCE in self.waiting and self.axes[module] != "shard"


def make(seed: int, schedules: Sequence[tuple[str, dict[str, int]]], groups: Mapping[str, Groups]) -> Scenario:
    """The scenario of a seed: the same on every rank.

    Args:
        groups: by what a module may say in `Scenario.axes`.
    """
    draw = random.Random(seed)
    schedule, params = draw.choice([*schedules, (PRE_BACKWARD, {})])
    axes = tuple(draw.choices(("both", "shard", "replicate"), weights=(3, 1, 1), k=len(NUMELS)))
    if draw.random() < 0.5:
        axes = ("both",) * len(NUMELS)
    waiting: frozenset[Kind] = frozenset()
    if draw.random() < 0.6:
        mixed = mixture(seed, [table(make_units(groups, axes))], DTYPES)
        schedule, params = mixed.text, {}
        waiting = frozenset([Kind.REDUCE_SCATTER] * mixed.rs_is_last + [Kind.ALL_REDUCE] * mixed.ar_is_last)
    elif schedule == "last_microbatch_allreduce":
        waiting = frozenset([Kind.ALL_REDUCE])
    num_backwards = draw.randint(1, 3)
    backwards = []
    for i in range(num_backwards):
        modules = list(range(len(NUMELS)))
        disorder = draw.random()
        if disorder < 0.3:
            draw.shuffle(modules)
        if disorder < 0.5:
            modules = [m for m in modules if draw.random() < 0.8]
        if draw.random() < 0.3:
            modules.insert(draw.randint(0, len(modules)), draw.randrange(len(NUMELS)))
        events = [Event(m, _some(draw, len(NUMELS[m]))) for m in modules]
        cut = len(events) if draw.random() < 0.6 else draw.randint(0, len(events))
        raises_after = draw.randint(0, cut) if i < num_backwards - 1 and draw.random() < 0.15 else None
        all_reduce = i == num_backwards - 1 or draw.random() < 0.4
        is_wide = draw.random() < 0.3
        is_last = i == num_backwards - 1 or draw.random() < 0.4
        backwards.append(Backward(tuple(events[:cut]), tuple(events[cut:]), all_reduce, raises_after, is_wide, is_last))
    return Scenario(schedule, tuple(params.items()), axes, tuple(backwards), waiting)


def _some(draw: random.Random, count: int) -> tuple[int, ...]:
    if draw.random() < 0.5:
        return tuple(range(count))
    return tuple(sorted(draw.sample(range(count), draw.randint(1, count))))


def gradient(rank: int, backward: int, event: int, module: int, param: int) -> torch.Tensor:
    """A whole gradient. Small integers: every sum is exact, in whatever order, in half precision too."""
    scale = 1 + rank + 3 * event + 5 * module + 7 * param + 11 * backward
    return torch.arange(NUMELS[module][param], dtype=torch.float32) % 5 + scale


def expected(scenario: Scenario, ranks_of: Mapping[str, Sequence[int]]) -> list[dict[int, torch.Tensor]]:
    """Whole gradients by module and parameter: means over the ranks that share the module.

    An abort drops the backward and all partial sums, that is, whatever was not all-reduced before it.
    """
    kept: list[dict[int, torch.Tensor]] = [{} for _ in NUMELS]
    unreduced: list[dict[int, torch.Tensor]] = [{} for _ in NUMELS]
    for b, backward in enumerate(scenario.backwards):
        if backward.raises_after is not None:
            unreduced = [{} for _ in NUMELS]
            continue
        for e, event in enumerate((*backward.events, *backward.told_last)):
            ranks = ranks_of[scenario.axes[event.module]]
            for param in event.params:
                whole = torch.stack([gradient(rank, b, e, event.module, param) for rank in ranks]).mean(0)
                sums = unreduced[event.module]
                sums[param] = sums.get(param, torch.zeros(())) + whole
        for module, sums in enumerate(unreduced):
            if not backward.is_last and (scenario.keeps_whole(module) or scenario.keeps_partial(module)):
                continue
            if backward.all_reduce or scenario.axes[module] == "shard":
                for param, whole in sums.items():
                    kept[module][param] = kept[module].get(param, torch.zeros(())) + whole
                sums.clear()
    return kept


def make_units(groups: Mapping[str, Groups], axes: Sequence[str]) -> list[ToyUnit]:
    """The modules of every scenario, over these axes."""
    return [ToyUnit(f"module {m}", numels, groups[axes[m]]) for m, numels in enumerate(NUMELS)]


def run(scenario: Scenario, rank: int, groups: Mapping[str, Groups], lanes: Lanes, memory: Memory) -> list[str]:
    """Run a scenario and compare it with what is expected.

    Args:
        groups: by what a module may say in `Scenario.axes`.

    Returns:
        Everything that is wrong.
    """
    units = make_units(groups, scenario.axes)
    plan = compile(scenario.schedule, table(units), **dict(scenario.params))
    executor = Executor(plan, units, Machinery(lanes, memory, None))
    problems: list[str] = []
    for b, backward in enumerate(scenario.backwards):
        for unit in units:
            unit.all_reduce = backward.all_reduce
        before = [dict(unit.grads) for unit in units]
        _run_backward(executor, units, backward, rank, b)
        report = executor.last_report
        if backward.raises_after is not None:
            for unit, grads in zip(units, before, strict=True):
                unit.grads = grads
            if memory.live_bytes:
                problems.append(f"{memory.live_bytes} bytes are left after an abort")
        elif report is not None and report.peak_bytes > report.declared_peak_bytes:
            problems.append(f"peak of {report.peak_bytes} bytes, {report.declared_peak_bytes} declared")
    if memory.live_bytes:
        problems.append(f"{memory.live_bytes} bytes are left")
    if executor.in_backward:
        problems.append("a backward is left under way")
    executor.close()
    ranks_of = {axes: sharing(of) for axes, of in groups.items()}
    for unit, right in zip(units, expected(scenario, ranks_of), strict=True):
        problems.extend(_compare(unit, right))
    return problems


def sharing(groups: Groups) -> list[int]:
    """The ranks over which a module of these groups is averaged; with both axes, all of them."""
    if groups.shard is not None and groups.replicate is not None:
        return list(range(dist.get_world_size()))
    return dist.get_process_group_ranks(groups.shard or groups.replicate)


def _run_backward(executor: Executor, units: list[ToyUnit], backward: Backward, rank: int, b: int) -> None:
    executor.begin(is_last=backward.is_last)
    events = (*backward.events, *backward.told_last)

    def complete(e: int, event: Event) -> None:
        unit = units[event.module]
        unit.add({param: gradient(rank, b, e, event.module, param) for param in event.params}, is_wide=backward.is_wide)
        if executor.keeps_whole(event.module):
            executor.keep(event.module, unit.kept_bytes)
        else:
            executor.complete(event.module, unit.gradients(unit.take_kept()))

    for e, event in enumerate(backward.events):
        if backward.raises_after == e:
            break
        _need(executor, units, event.module, in_order=all(of.module == at for at, of in enumerate(backward.events[: e + 1])))
        complete(e, event)
    if backward.raises_after is not None:
        executor.abort()
        for unit in units:
            unit.take_kept()
        return
    with executor.collecting():
        for e in range(len(backward.events), len(events)):
            complete(e, events[e])
        for module, unit in enumerate(units):
            # As FSDP2 at its end: what earlier backwards left is complete, new gradients or not.
            if unit.kept and not executor.keeps_whole(module):
                executor.complete(module, unit.gradients(unit.take_kept()))
    executor.root()


def _need(executor: Executor, units: list[ToyUnit], module: int, *, in_order: bool) -> None:
    """Compute of a module begins. Where modules come in the order of the plan, it finds the parameters that this gathers."""
    unit = units[module]
    unit.gathered.clear()
    executor.pre_backward(module)
    if in_order and executor.gathers and unit.groups.shard is not None:
        assert len(unit.gathered) == 1, f"{unit.name} has no parameters"
    for rows in unit.gathered:
        assert torch.equal(rows, unit.all_shards()), f"{unit.name} has wrong parameters: {rows}"


def _compare(unit: ToyUnit, right: dict[int, torch.Tensor]) -> list[str]:
    if unit.grads.keys() != right.keys():
        return [f"{unit.name}: gradients of {sorted(unit.grads)}, not {sorted(right)}"]
    return [
        f"{unit.name}, parameter {param}: {unit.grads[param].tolist()}, not {shard.tolist()}"
        for param, whole in right.items()
        if not torch.equal(unit.grads[param], shard := unit.shard_of(whole))
    ]
