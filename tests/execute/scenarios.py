"""Random backwards of a toy HSDP: modules that come out of order, twice, late or never, and partial sums of some parameters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commplan import compile  # noqa: A004
from commplan.execute.executor import Executor, Machinery
from commplan.execute.lanes import Lanes
from commplan.execute.memory import Memory
from tests.execute.toy import Groups, ToyUnit, table

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


@dataclass(frozen=True)
class Scenario:
    """Some backwards, the last of which leaves nothing unreduced; `axes` by module: "both", "shard" or "replicate"."""

    schedule: str
    params: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    backwards: tuple[Backward, ...]


def make(seed: int, schedules: Sequence[tuple[str, dict[str, int]]]) -> Scenario:
    """The scenario of a seed: the same on every rank."""
    draw = random.Random(seed)
    schedule, params = draw.choice([*schedules, (PRE_BACKWARD, {})])
    axes = tuple(draw.choices(("both", "shard", "replicate"), weights=(3, 1, 1), k=len(NUMELS)))
    if draw.random() < 0.5:
        axes = ("both",) * len(NUMELS)
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
        backwards.append(Backward(tuple(events[:cut]), tuple(events[cut:]), all_reduce, raises_after, is_wide))
    return Scenario(schedule, tuple(params.items()), axes, tuple(backwards))


def _some(draw: random.Random, count: int) -> tuple[int, ...]:
    if draw.random() < 0.5:
        return tuple(range(count))
    return tuple(sorted(draw.sample(range(count), draw.randint(1, count))))


def gradient(rank: int, backward: int, event: int, module: int, param: int) -> torch.Tensor:
    """A whole gradient. Small integers: every sum is exact, in whatever order."""
    scale = 1 + rank + 3 * event + 5 * module + 7 * param + 11 * backward
    return torch.arange(1, NUMELS[module][param] + 1, dtype=torch.float32) * scale


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
            if backward.all_reduce or scenario.axes[module] == "shard":
                for param, whole in sums.items():
                    kept[module][param] = kept[module].get(param, torch.zeros(())) + whole
                sums.clear()
    return kept


def run(scenario: Scenario, rank: int, groups: Mapping[str, Groups], lanes: Lanes, memory: Memory) -> list[str]:
    """Run a scenario and compare it with what is expected.

    Args:
        groups: by what a module may say in `Scenario.axes`.

    Returns:
        Everything that is wrong.
    """
    units = [ToyUnit(f"module {m}", numels, groups[scenario.axes[m]]) for m, numels in enumerate(NUMELS)]
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
    executor.begin()
    events = (*backward.events, *backward.told_last)

    def complete(e: int, event: Event) -> None:
        whole = {param: gradient(rank, b, e, event.module, param) for param in event.params}
        if backward.is_wide:
            whole = {param: of.double() for param, of in whole.items()}
        executor.complete(event.module, units[event.module].gradients(whole))

    for e, event in enumerate(backward.events):
        if backward.raises_after == e:
            break
        executor.pre_backward(event.module)
        complete(e, event)
    if backward.raises_after is not None:
        executor.abort()
        return
    with executor.collecting():
        for e in range(len(backward.events), len(events)):
            complete(e, events[e])
    executor.root()


def _compare(unit: ToyUnit, right: dict[int, torch.Tensor]) -> list[str]:
    if unit.grads.keys() != right.keys():
        return [f"{unit.name}: gradients of {sorted(unit.grads)}, not {sorted(right)}"]
    return [
        f"{unit.name}, parameter {param}: {unit.grads[param].tolist()}, not {shard.tolist()}"
        for param, whole in right.items()
        if not torch.equal(unit.grads[param], shard := unit.shard_of(whole))
    ]
