"""A sharded model -> its parameter groups, and the module table that the compiler works with."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from commplan.errors import AttachError
from commplan.fsdp2 import torch_private as private
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group of a model: a module of the plan.

    Attributes:
        name: the name of the module that was sharded; with several groups in one module, "name[i]".
        parameter_names: by position in the group.
        trainable: whether each parameter required a gradient when the group was described; a plan counts on these, and
            one that is frozen later is merely without a gradient.
        is_gathered: its parameters are whole when backward begins.
        mesh: the ranks that it is spread over; groups on equal meshes hold the same object.
    """

    name: str
    raw: private.ParamGroup
    state: private.State
    parameter_names: tuple[str, ...]
    trainable: tuple[bool, ...]
    is_gathered: bool
    mesh: private.MeshRanks

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter took part in reduction when the group was described."""
        return any(self.trainable)

    def with_thawed(self) -> Group:
        """The group, with parameters that have come to require a gradient."""
        if all(self.trainable):
            return self
        now = private.trainable(self.raw)
        if all(known or not is_trainable for known, is_trainable in zip(self.trainable, now, strict=True)):
            return self
        return replace(self, trainable=tuple(map(operator.or_, self.trainable, now)))


@dataclass(frozen=True, slots=True)
class Orders:
    """Indices of groups in the order in which gradients become complete, and in which backward needs parameters."""

    completion: tuple[int, ...]
    need: tuple[int, ...]


def describe(model: nn.Module) -> ModuleTable:
    """The module table of `model`, with the orders that its module tree suggests.

    Raises:
        AttachError: the model is not sharded by `fully_shard`, or a parameter that needs a gradient is in no group.
    """
    private.require_known_torch()
    groups = find_groups(model)
    return make_table(groups, guess_orders(model, groups))


def find_groups(model: nn.Module) -> list[Group]:
    """The parameter groups of `model`, in the order in which forwards begin if modules run as they were registered."""
    roots = set(root_modules(model))
    path_of = {module: name for name, module in model.named_modules()}
    # FSDP2 makes a mesh for each module that is given none; they are equal.
    ranks_of = functools.cache(private.mesh_ranks)
    found: list[Group] = []
    for module_name, state in private.states(model):
        raws = private.groups(state)
        is_root = any(m in roots for m in private.modules(state))
        for i, raw in enumerate(raws):
            owners = private.owners(raw)
            names = tuple(f"{path_of[owner]}.{name}".removeprefix(".") for owner, name in owners)
            name = (module_name or "(root)") + (f"[{i}]" if len(raws) > 1 else "")
            is_gathered = private.stays_gathered(state, raw, is_root=is_root)
            mesh = ranks_of(private.mesh(raw))
            found.append(Group(name, raw, state, names, private.trainable(raw), is_gathered, mesh))
    if not found:
        raise AttachError(
            "the model holds no parameter that is sharded by FSDP2: call torch.distributed.fsdp.fully_shard on its "
            "blocks and on the model before commplan"
        )
    _refuse_ties(found)
    managed = {id(p) for group in found for p in private.parameters(group.raw)}
    stray = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in managed]
    if stray:
        raise AttachError(
            f"parameter {stray[0]!r} has no op: it is in no module that fully_shard was called on, or in ignored_params, so "
            f"nothing would reduce its gradient{f' (nor that of {len(stray) - 1} others)' if len(stray) > 1 else ''}; shard "
            "the module that holds it, or the whole model"
        )
    return found


def _refuse_ties(groups: Sequence[Group]) -> None:
    """Refuse a parameter that two groups hold: each has a shard of its own, so they would drift apart."""
    first: dict[int, str] = {}
    for group in groups:
        for origin, name in zip(private.origins(group.raw), group.parameter_names, strict=True):
            if origin in first:
                raise AttachError(
                    f"parameter {name!r} is tied to {first[origin]!r}, but fully_shard put them into two groups, which "
                    "unties them: shard the two modules together, fully_shard([one, other]), or leave both to the root"
                )
            first[origin] = name


def all_ranks(groups: Sequence[Group]) -> list[int]:
    """The global ranks that share any of the groups, ascending."""
    return sorted({rank for mesh in {id(group.mesh): group.mesh for group in groups}.values() for rank in mesh.ranks})


def root_modules(model: nn.Module) -> list[nn.Module]:
    """The sharded modules of `model` that have no sharded module above them."""
    if isinstance(model, FSDPModule):
        return [model]
    found: list[nn.Module] = []
    for child in model.children():
        found.extend(m for m in root_modules(child) if m not in found)
    return found


def guess_orders(model: nn.Module, groups: Sequence[Group]) -> Orders:
    """Orders of the trainable groups if modules run in the order in which they were registered."""
    begins = [i for i, group in enumerate(groups) if group.is_trainable]
    by_state: dict[int, list[int]] = {}
    for i in begins:
        by_state.setdefault(id(groups[i].state), []).append(i)
    ends: list[int] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if isinstance(module, FSDPModule):
            ends.extend(by_state.pop(id(private.state_of(module)), ()))

    visit(model)
    return Orders(tuple(reversed(begins)), tuple(reversed(ends)))


def make_table(groups: Sequence[Group], orders: Orders) -> ModuleTable:
    """The table of the groups in `orders`; its rows are in completion order."""
    place = {group: n for n, group in enumerate(orders.completion)}
    if not orders.completion:
        raise AttachError("no parameter of the model requires a gradient: there is nothing to reduce")
    return ModuleTable(
        modules=tuple(_row(groups[i]) for i in orders.completion),
        need_order=tuple(place[i] for i in orders.need if i in place),
    )


def _row(group: Group) -> Module:
    facts = private.param_facts(group.raw)
    mesh = private.mesh_facts(group.raw)
    axes = {}
    if mesh.replicate is not None:
        axes[Axis.REPLICATE] = mesh.replicate.size()
    if mesh.shard is not None:
        axes[Axis.SHARD] = mesh.shard.size()
    trainable = next((f for f, is_trainable in zip(facts, group.trainable, strict=True) if is_trainable), facts[0])
    return Module(
        name=group.name,
        parameters=tuple(
            Parameter(
                name=name,
                shape=fact.shape,
                dtype=_dtype_name(fact.orig_dtype),
                requires_grad=is_trainable,
                shard_dim=fact.shard_dim,
            )
            for name, fact, is_trainable in zip(group.parameter_names, facts, group.trainable, strict=True)
        ),
        axes=axes,
        reduce_dtype=_dtype_name(trainable.reduce_dtype),
        gather_dtype=_dtype_name(trainable.compute_dtype),
        resharded_after_forward=not group.is_gathered,
        group=group.mesh.identity,
        scaling=private.scaling(group.raw),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
