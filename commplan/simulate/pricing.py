"""A profile and a plan -> what each op and each module of it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from commplan.errors import CommplanError
from commplan.graph.timeline import orders
from commplan.language.modules import Module
from commplan.language.profiles import Host, Profile
from commplan.language.source import did_you_mean, shown
from commplan.ops import COMPUTE_LANE, TRAITS, Axis, Kind
from commplan.plan.model import OpStep, Plan
from commplan.plan.wire import copied_on_lane, is_gathered_in_place, sent_as_it_lies, wire_bytes
from commplan.simulate.costs import Costs, OpCost


def costs(plan: Plan, profile: Profile) -> Costs:
    """The cost model of `plan` under `profile`.

    Raises:
        CommplanError: the profile does not say what something costs that the plan does; names it.
    """
    table = plan.modules.modules
    completion, need = ([table[index] for index in order] for order in orders(plan.modules))
    steps = [step for step in plan.steps if isinstance(step, OpStep)]
    gathered = {member: step for step in steps if step.kind is Kind.ALL_GATHER for member in step.op.members}
    lies = sent_as_it_lies(plan)
    unpacked = {step.op for step in steps if not profile.host.packs_lone and lies(step)}
    copied_bytes = copied_on_lane(plan)
    ops = {}
    for step in steps:
        cost = _op_cost(step, need if step.kind is Kind.ALL_GATHER else completion, profile, packs=step.op not in unpacked)
        copying_s = _over(copied_bytes(step), profile.host.pack_bytes_per_s)
        ops[step.op] = replace(cost, latency_s=cost.latency_s + copying_s)
    compute_s = list(compute_alone(plan, profile))
    gather_s = [0.0] * len(table)
    for place, index in enumerate(orders(plan.modules)[1]):
        module, host = table[index], profile.host
        if module.shard_size == 1 or not module.resharded_after_forward:
            continue
        if (gather := gathered.get(place)) is not None:
            if not is_gathered_in_place(gather, [need[n] for n in gather.op.members]):
                compute_s[index] += _over(module.gathered_bytes, host.unpack_bytes_per_s)
            continue
        compute_s[index] += _over(module.gathered_bytes, host.fsdp2_copy_bytes_per_s or host.unpack_bytes_per_s)
        if profile.fsdp2_gathers == "blocking":
            gather_s[index] = _fsdp2_gather_s(module, profile)
    return Costs(
        compute_s,
        ops,
        {name: link.demand for name, link in profile.links.items()},
        {name: link.slowdown for name, link in profile.links.items() if link.slowdown},
        gather_s,
        profile.compute_s.jitter,
        {name: link.jitter for name, link in profile.links.items() if link.jitter},
        profile.axes[Axis.SHARD].link if Axis.SHARD in profile.axes else "",
    )


def compute_alone(plan: Plan, profile: Profile) -> tuple[float, ...]:
    """Seconds of backward of each module, by its index in the table, without communication; 0 for those that no gradient
    needs.

    Raises:
        CommplanError: the profile does not say, or names a module that is not there.
    """
    table = plan.modules.modules
    names = {module.name for module in table}
    for name in profile.compute_s.modules:
        if name not in names:
            hint = did_you_mean(name, names)
            raise CommplanError(f"the profile {profile.name!r} has a module {shown(name)}, which the model has not: {hint}")
    needed = set(orders(plan.modules)[1])
    return tuple(_compute_s(module, profile) if index in needed else 0 for index, module in enumerate(table))


def _op_cost(step: OpStep, modules: Sequence[Module], profile: Profile, *, packs: bool) -> OpCost:
    """`packs`: what it sends may have to be packed."""
    members = [modules[n] for n in step.op.members]
    host = profile.host
    pack_s = _pack_s(step, members, host) if packs else 0
    if step.kind is Kind.APPLY:
        seconds = host.apply_s + _over(sum(m.shard_bytes for m in members), host.apply_bytes_per_s)
        return OpCost(latency_s=seconds) if step.lane == COMPUTE_LANE else OpCost(issue_s=host.issue_s, latency_s=seconds)
    axis = TRAITS[step.kind].axis if step.axis is None else step.axis
    assert axis is not None
    if members[0].axes.get(axis, 1) == 1:
        # Of one rank: nothing is sent.
        return OpCost(host.issue_s + pack_s)
    size_bytes = wire_bytes(step, members)
    latency_s, transfer_s = profile.transfer(axis, step.kind).seconds(size_bytes)
    return OpCost(host.issue_s + pack_s, latency_s, transfer_s, profile.axes[axis].link)


def _pack_s(step: OpStep, members: Sequence[Module], host: Host) -> float:
    """Copying into what is sent; all pieces are packed with the first."""
    if step.op.piece > 0:
        return 0
    if step.kind is Kind.REDUCE_SCATTER:
        return _over(sum(m.reduced_bytes for m in members), host.pack_bytes_per_s)
    if step.kind is Kind.ALL_GATHER:
        if is_gathered_in_place(step, members) and members[0].parameters[0].dtype == members[0].gather_dtype:
            return 0
        return _over(sum(m.gathered_bytes // m.shard_size for m in members), host.pack_bytes_per_s)
    # Without a shard axis the all-reduce packs.
    return _over(sum(m.reduced_bytes for m in members if Axis.SHARD not in m.axes), host.pack_bytes_per_s)


def _compute_s(module: Module, profile: Profile) -> float:
    found = profile.compute_s.modules.get(module.name, profile.compute_s.default)
    if found is None:
        raise CommplanError(
            f"the profile {profile.name!r} does not say how long backward of module {module.name!r} takes: add "
            "compute_s.default, or the module under compute_s.modules"
        )
    return found


def _fsdp2_gather_s(module: Module, profile: Profile) -> float:
    """How long FSDP2's own all-gather holds compute, as it does on a CPU."""
    own = profile.axes[Axis.SHARD].fsdp2_all_gather if Axis.SHARD in profile.axes else None
    gather = own or profile.transfer(Axis.SHARD, Kind.ALL_GATHER)
    return sum(gather.seconds(module.gathered_bytes))


def _over(size_bytes: int, bytes_per_s: float | None) -> float:
    return 0 if bytes_per_s is None else size_bytes / bytes_per_s
