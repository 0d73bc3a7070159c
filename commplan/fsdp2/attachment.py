"""`attach`: let a schedule drive the gradient communication of a model that `fully_shard` sharded.

Attaching is a transaction: compile and check, agree with the other ranks, make process groups, and only then replace four
methods on each parameter group and one on each state of this model.  `detach` puts them back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import nn

from commplan import compiler
from commplan.errors import AttachError, ExecutionError
from commplan.execute.agreement import REFUSED, agree, confirm
from commplan.execute.board import Board
from commplan.execute.control import Control, Message
from commplan.execute.executor import Executor
from commplan.execute.lanes import Lanes
from commplan.execute.lookout import Lookout
from commplan.execute.machinery import Machinery
from commplan.execute.memory import Memory
from commplan.execute.peers import Peers
from commplan.fsdp2 import torch_faults as faults
from commplan.fsdp2 import torch_gradients, torch_parameters
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.announce import log_attached, log_recompiled, warn_of_obstacles
from commplan.fsdp2.devices import backend_for, device_problems, group_timeout, lanes_for
from commplan.fsdp2.driver import Driver, Recompile
from commplan.fsdp2.groups import Group, Orders, all_ranks, find_groups, guess_orders, make_table, root_modules
from commplan.fsdp2.unit import FsdpUnit, OwnGroups
from commplan.language import resolve
from commplan.language.spec import OpLine, ScheduleSpec
from commplan.ops import Axis, Kind, Section
from commplan.plan.model import OpStep, Plan
from commplan.sight.figures import Report, describe_backward
from commplan.sight.report import BackwardReport, stats
from commplan.sight.runs import Run

logger = logging.getLogger("commplan")


RankChecks = Literal["off", "backward", "always"]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run, as opposed to what.

    Attributes:
        timeout_s: how long one collective, or the arrival of another rank, may take.
        rank_checks: compare ranks in each "backward", which costs one all-gather of three integers beside it; "always":
            before each reduction as well; "off".
        make_lanes: (device, timeout_s) -> lanes; the default suits the device.
        make_memory: makes the account of communication buffers.
    """

    timeout_s: float = 600.0
    rank_checks: RankChecks = "backward"
    make_lanes: Callable[[torch.device, float], Lanes] = lanes_for
    make_memory: Callable[[], Memory] = field(default=Memory)


class Attachment:
    """A schedule at work on a model. Also a context manager that detaches at its end."""

    def __init__(
        self, driver: Driver, groups: Sequence[dist.ProcessGroup], peers: Peers, coordinates: Mapping[str, int]
    ) -> None:
        self._driver = driver
        self._groups = list(groups)
        self._peers = peers
        self._coordinates = coordinates

    @property
    def plan(self) -> Plan:
        """The plan in use. It is compiled anew if modules turn out to run in another order than they were registered."""
        return self._driver.executor.plan

    @property
    def units(self) -> Sequence[FsdpUnit]:
        """The model's parameter groups as they are driven, frozen ones included, in the order of their forwards."""
        return self._driver.units

    @property
    def last_backward(self) -> BackwardReport | None:
        """What happened in the last backward of this rank that reduced anything."""
        return self._driver.executor.last_report

    def stats(self) -> dict[str, float]:
        """Figures of this rank's last backward for a logger, "commplan/exposed_s" and others; empty before the first.

        Asks no other rank. On a device it waits until the last backward is over there.
        """
        return {} if self.last_backward is None else stats(self.last_backward)

    def report(self, *, local: bool = False, timeout_s: float = 60.0) -> Report:
        """What happened in the last backward, and why collectives were exposed. Its `str` is a table.

        Every rank of the model has to call it, after the same backward: they find out who waited for whom.

        Args:
            local: ask no other rank; times of peers stay unknown.
            timeout_s: how long to wait for the other ranks.

        Raises:
            ExecutionError: ranks did not come within the timeout, or come from different backwards; names them.  Training
                may go on.
        """
        last = self.last_backward
        arrivals = None if local else self._peers.meet(last, timeout_s)
        if last is None:
            raise ExecutionError("report() before the first backward that reduces anything")
        return describe_backward(last, dist.get_rank(), arrivals)

    def save_run(self, path: str | Path) -> None:
        """Write this rank's last backward into a JSON file, for `commplan trace` and `commplan report`; "{rank}" in its
        name is this rank.

        Asks no other rank. On a device it waits until the last backward is over there.

        Raises:
            ExecutionError: before the first backward that reduces anything.
            OSError: the file can't be written.
        """
        last = self.last_backward
        if last is None:
            raise ExecutionError("save_run() before the first backward that reduces anything")
        run = Run(dist.get_rank(), self._coordinates, time.time() - time.perf_counter(), last)
        Path(str(path).replace("{rank}", str(run.rank))).write_text(run.to_json(), encoding="utf-8")

    def detach(self) -> None:
        """Give the model back to FSDP2 as it was. Gradients of an unfinished backward are dropped. May be called twice."""
        self._driver.remove()
        while self._groups:
            private.end_group(self._groups.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.detach()


def attach(
    model: nn.Module,
    schedule: str | Path | ScheduleSpec,
    *,
    options: Options | None = None,
    rank_checks: RankChecks | None = None,
    **params: int,
) -> Attachment:
    """Drive the backward communication of `model` by `schedule`. Every rank has to call this alike.

    Args:
        model: sharded by `torch.distributed.fsdp.fully_shard`, before or after its first forward.
        schedule: a library name, a path, YAML text, or a parsed schedule.
        rank_checks: takes the place of `options.rank_checks`.
        params: values of the schedule's params.

    Raises:
        ScheduleError: the schedule breaks rules for this model.
        AttachError: the model can't be driven, or ranks disagree; the model is as it was.
    """
    options = options or Options()
    if rank_checks is not None:
        options = replace(options, rank_checks=rank_checks)
    if options.rank_checks not in get_args(RankChecks):
        raise AttachError(
            f"rank_checks is {options.rank_checks!r}; expected one of {', '.join(map(repr, get_args(RankChecks)))}"
        )
    if not dist.is_initialized():
        raise AttachError("torch.distributed is not initialised: call init_process_group and fully_shard before attach")
    rank = dist.get_rank()
    everyone: Sequence[int] = range(dist.get_world_size())
    try:
        private.require_known_torch()
        groups = find_groups(model)
        everyone = all_ranks(groups)
        for problem in _problems(model, groups):
            raise AttachError(problem)
        if rank == everyone[0]:
            warn_of_obstacles(groups[0].raw.device)
        spec = resolve(schedule)
        orders = guess_orders(model, groups)
        plan = compiler.compile(spec, make_table(groups, orders), **params)
        for problem in _prefetch_problems(model, plan):
            raise AttachError(problem)
    except Exception as error:
        # The others must not wait for this rank.
        agree(private.default_store(), everyone, rank, {REFUSED: f"{type(error).__name__}: {error}"}, options.timeout_s)
        raise
    record = _record(spec, plan, groups, options)
    agreement = agree(private.default_store(), everyone, rank, record, options.timeout_s)
    if rank == everyone[0] and all(Axis.REPLICATE not in m.axes for m in plan.modules.modules):
        logger.warning("the mesh has no replicate axis: all-reduces of schedule %s are left out", spec.name)
    prepared = _Prepared(model, groups, orders, spec, plan, everyone)
    try:
        attachment = _install(prepared, options, agreement)
    except Exception as error:
        confirm(private.default_store(), everyone, rank, agreement, options.timeout_s, f"{type(error).__name__}: {error}")
        raise
    try:
        confirm(private.default_store(), everyone, rank, agreement, options.timeout_s)
    except BaseException:
        attachment.detach()
        raise
    log_attached(plan, groups[0].raw.device)
    return attachment


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known once every rank has agreed; nothing was touched yet."""

    model: nn.Module
    groups: Sequence[Group]
    orders: Orders
    spec: ScheduleSpec
    plan: Plan
    ranks: Sequence[int]


def _problems(model: nn.Module, groups: Sequence[Group]) -> Iterator[str]:
    """Why the model can't be driven, found without touching it."""
    roots = root_modules(model)
    owners: list[tuple[str, private.ParamGroup | private.State]] = [(group.name, group.raw) for group in groups]
    owners.extend((name or "(root)", state) for name, state in private.states(model))
    for name, owner in owners:
        if replaced := private.replaced_attributes(owner):
            yield (
                f"module {name!r} is driven already ({', '.join(replaced)} replaced): "
                "detach what is attached to the model first"
            )
    for group in groups:
        if private.is_inner(group.state) and any(m in roots for m in private.modules(group.state)):
            yield f"module {group.name!r} is a part of a sharded model, whose root is outside it: attach to the whole model"
        if torch_gradients.holds_partial_sum(group.raw):
            yield f"module {group.name!r} holds a gradient that is not all-reduced yet: attach between steps, after zero_grad"
        for refusal in private.refusals(group.raw):
            yield f"module {group.name!r} {refusal}"
    yield from device_problems({group.name: group.raw.device for group in groups})


def _prefetch_problems(model: nn.Module, plan: Plan) -> Iterator[str]:
    """What keeps the plan from gathering parameters, if it does."""
    if not any(isinstance(step, OpStep) and step.kind is Kind.ALL_GATHER for step in plan.steps):
        return
    for name, state in private.states(model):
        if torch_parameters.prefetches_in_backward(state):
            yield (
                f"module {name or '(root)'!r} was told what to gather ahead in backward (set_modules_to_backward_prefetch), "
                "but the schedule gathers parameters itself: call it with [] first, or take a schedule without AG"
            )


def _lanes_with_own_communicators(spec: ScheduleSpec) -> Mapping[str, str]:
    """Communicator -> axis, for every lane of the schedule that has one of its own."""
    own = {lane.name for lane in spec.lanes if lane.own_communicator}
    lines = (line for section in Section for line in spec.lines(section) if isinstance(line, OpLine))
    return {f"{line.axis}@{line.lane}": str(line.axis) for line in lines if line.lane in own and line.axis is not None}


def _record(spec: ScheduleSpec, plan: Plan, groups: Sequence[Group], options: Options) -> dict[str, str]:
    """What has to be equal on every rank, coarse first."""
    return {
        "the schedule": spec.text,
        "the schedule's params": "\n".join(f"{name} = {value}" for name, value in plan.params),
        "the torch release": torch.__version__,
        "the module table": "\n".join(m.model_dump_json() for m in plan.modules.modules) + f"\n{plan.modules.need_order}",
        "the plan": plan.digest,
        "options": f"timeout_s = {options.timeout_s}\nrank_checks = {options.rank_checks}",
        "FSDP2's settings": "\n".join(f"{group.name}: {private.settings(group.raw)}" for group in groups),
    }


def _install(prepared: _Prepared, options: Options, agreement: str) -> Attachment:
    """Make process groups and replace methods; on failure nothing of either is left."""
    maker = _GroupMaker(agreement, options.timeout_s)
    driver: Driver | None = None
    control: Control | None = None
    executor: Executor | None = None
    try:
        own_lanes = _lanes_with_own_communicators(prepared.spec)
        units = [FsdpUnit(group, maker.own_groups(group, own_lanes)) for group in prepared.groups]
        if options.rank_checks != "off":
            control = Control(maker.make(prepared.ranks, "control", "gloo"), options.timeout_s)
        store = faults.own_store(private.default_store())
        lookout = Lookout(store, agreement, dist.get_rank(), prepared.ranks, options.timeout_s)
        machinery = Machinery(
            options.make_lanes(prepared.groups[0].raw.device, options.timeout_s),
            options.make_memory(),
            control,
            options.rank_checks == "always",
            lookout,
            private.profiler_range,
        )
        executor = Executor(prepared.plan, [units[i] for i in prepared.orders.completion], machinery)
        recompile = _recompiler(prepared, control)
        driver = Driver(prepared.groups, units, prepared.orders, executor, recompile, options.timeout_s)
        driver.install(prepared.model)
    except BaseException:
        # Whatever was replaced goes back first: the groups must have no user left.
        if driver is not None:
            driver.remove()
        elif executor is not None:
            executor.close()
        elif control is not None:
            control.close()
        for process_group in maker.made:
            private.end_group(process_group)
        raise
    board = Board(lambda: faults.own_store(private.default_store()), agreement, dist.get_rank(), prepared.ranks)
    return Attachment(driver, maker.made, Peers(board), private.mesh_coordinates(prepared.groups[0].raw))


def _recompiler(prepared: _Prepared, control: Control | None) -> Recompile:
    """Compiles for other orders, and lets no rank run them before all have found the same."""
    params = dict(prepared.plan.params)

    def recompile(groups: Sequence[Group], orders: Orders) -> Plan:
        plan = compiler.compile(prepared.spec, make_table(groups, orders), **params)
        if control is not None:
            control.agree(Message.MODULE_ORDER, [m.name for m in plan.modules.modules])
        log_recompiled(plan)
        return plan

    return recompile


class _GroupMaker:
    """Makes process groups, collectively: every rank of a group has to ask for it at the same point.

    Args:
        prefix: begins their names; equal on all ranks, and never used before.
    """

    def __init__(self, prefix: str, timeout_s: float) -> None:
        self._prefix = prefix
        self.made: list[dist.ProcessGroup] = []
        self._timeout_s = timeout_s
        self._own: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._own_of: dict[tuple[private.MeshFacts, torch.device], OwnGroups] = {}

    def make(self, ranks: Sequence[int], purpose: str, backend: str) -> dist.ProcessGroup:
        """A new group over `ranks`."""
        group = private.new_group(
            f"{self._prefix}/{purpose}/{min(ranks)}", ranks, backend, group_timeout(backend, self._timeout_s)
        )
        self.made.append(group)
        return group

    def own_groups(self, group: Group, own_lanes: Mapping[str, str]) -> OwnGroups:
        """The process groups for a parameter group's collectives; those of one purpose and equal ranks are shared, and groups
        on one mesh get the same object.

        One process group takes one queue only.  FSDP2 goes on gathering parameters on its shard group, and a user may
        reduce whatever on the groups of the mesh, both on the thread of compute while lanes run.

        Args:
            own_lanes: communicator -> its axis, for lanes with one of their own; always the same.
        """
        place = private.mesh_facts(group.raw), group.raw.device
        if place not in self._own_of:
            self._own_of[place] = self._find(*place, own_lanes)
        return self._own_of[place]

    def _find(self, mesh: private.MeshFacts, device: torch.device, own_lanes: Mapping[str, str]) -> OwnGroups:
        of_axis = {Axis.SHARD: mesh.shard, Axis.REPLICATE: mesh.replicate}
        found = {
            Axis.SHARD: mesh.reduce_scatter or self._like(mesh.shard, "reduce-scatter", device),
            Axis.REPLICATE: self._like(mesh.replicate, "all-reduce", device),
            **{communicator: self._like(of_axis[Axis(axis)], communicator, device) for communicator, axis in own_lanes.items()},
        }
        return {communicator: made for communicator, made in found.items() if made is not None}

    def _like(self, model: dist.ProcessGroup | None, purpose: str, device: torch.device) -> dist.ProcessGroup | None:
        if model is None:
            return None
        ranks = tuple(dist.get_process_group_ranks(model))
        if (purpose, ranks) not in self._own:
            self._own[purpose, ranks] = self.make(ranks, f"{purpose} {len(self._own)}", backend_for(model, device))
        return self._own[purpose, ranks]
