"""What commplan takes from torch under names with an underscore: process groups, hooks, and how a model is sharded.

`torch_gradients` goes on with the way of a gradient, `torch_faults` with what goes wrong, `torch_devices` with devices.  They
are written for the latest release that is known; what others do differently is in `torch_releases`, whose
`require_known_torch` has to pass before anything in them is used.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import MethodType
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from commplan.errors import AttachError
from commplan.fsdp2 import torch_devices as devices
from commplan.fsdp2 import torch_releases as releases
from commplan.fsdp2.torch_releases import require_known_torch as require_known_torch

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
    from torch.distributed.fsdp._fully_shard import _fsdp_state as state
except ImportError as error:
    raise AttachError(f"torch {torch.__version__} has no FSDP2; needed: torch {', '.join(releases.RELEASES)}") from error

ParamGroup = param_group.FSDPParamGroup
State = state.FSDPState
FINAL_CALLBACK: Final = "_root_post_backward_final_callback"
STATE_PRE_BACKWARD: Final = "_pre_backward"
HOOKS_IN_BACKWARD: Final = ("pre_backward", "post_backward", FINAL_CALLBACK)


def in_autograd() -> bool:
    """Whether this thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


def is_profiled() -> bool:
    """Whether torch's profiler is active."""
    return torch.autograd.profiler._is_profiler_enabled


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A range of torch's profiler, if one is active: the public `record_function` takes microseconds even where none is."""
    return torch.profiler.record_function(name) if is_profiled() else nullcontext()


def default_store() -> Store:
    """The store through which the default process group was made."""
    return dist.distributed_c10d._get_default_store()


def new_group(name: str, ranks: Sequence[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group over `ranks`, which all of them have to ask for under the same new `name`.

    `dist.new_group` either has to be called by ranks that do not belong to the group, or derives the name from the number of
    groups that this process has: after a group was destroyed, the new one gets its name and finds its addresses.
    """
    c10d = dist.distributed_c10d
    members = sorted(ranks)
    with devices.unsplit():
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            dist.Backend(backend),
            default_store(),
            cast(Any, name),
            timeout=timeout,
            group_desc=name,
        )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    return group


def end_group(group: dist.ProcessGroup) -> None:
    """Destroy a process group, unless it went with the default one already."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, never traced by torch.compile.

    Made at once, not at the first call as FSDP2 does: that call may already be one that is traced.
    """
    guarded: Callable[..., Any] = torch.compiler.disable(function, recursive=True, reason="skipping commplan's hooks")
    return guarded


def as_hook(name: str, function: Callable[..., Any], *, is_inside: bool = False) -> Callable[..., Any]:
    """`function` in the place of FSDP2's hook `name`: guarded from torch.compile and type checks as that one is.

    Args:
        is_inside: only called from a hook that is guarded already.
    """
    if is_inside:
        return function
    if name in HOOKS_IN_BACKWARD and releases.has_typecheck():
        function = functools.partial(_without_typecheck, function)
    return without_dynamo(function)


def _without_typecheck(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with releases.no_typecheck():
        return function(*args, **kwargs)


def is_guarded(method: Callable[..., Any]) -> bool:
    """Whether FSDP2's `method` has its guard from torch.compile, and nothing of others around it."""
    return isinstance(method, MethodType) and any(method.__code__ is guard for guard in releases.guards_from_dynamo())


def without_guard(method: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2's `method` without its guard from torch.compile, for callers that have one; what others put around it stays."""
    if not isinstance(method, MethodType) or not is_guarded(method):
        return method
    return functools.partial(inspect.unwrap(method.__func__, stop=lambda f: f is not method.__func__), method.__self__)


def state_of(module: FSDPModule) -> State:
    """The FSDP2 state of a sharded module."""
    return module._get_fsdp_state()


def states(model: nn.Module) -> Iterator[tuple[str, State]]:
    """Every FSDP2 state in `model` with its module's name: `named_modules()` order, each once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            found = state_of(module)
            if id(found) not in seen:
                seen.add(id(found))
                yield name, found


def groups(of: State) -> list[ParamGroup]:
    """The parameter groups of one state, in forward order."""
    return releases.param_groups(of)


def modules(of: State) -> tuple[nn.Module, ...]:
    """The modules that one state shards together."""
    return of._modules


def stays_gathered(of: State, group: ParamGroup, *, is_root: bool) -> bool:
    """Whether parameters are still whole when backward begins; FSDP2 decides so for its root at the first forward."""
    if is_root and of._is_root is None and of._auto_reshard_after_forward:
        return True
    return not group._reshard_after_forward


def has_queued_callback(of: State) -> bool:
    """Whether this state's root still has its final callback to run in this backward."""
    return of._state_ctx.post_backward_final_callback_queued


def is_last_backward(roots: Iterable[State]) -> bool:
    """What `set_is_last_backward` said, as FSDP2's last word on it; true where nobody ever called it."""
    return all(root._state_ctx.is_last_backward for root in roots)


def is_inner(of: State) -> bool:
    """Whether a forward showed that this state has a sharded module above it."""
    return of._is_root is False


def reset_iteration(of: State) -> None:
    """Let a root forget an iteration that ended in an exception, whole gradients that wait in its groups included."""
    releases.reset_iteration(of)
    for inner in of._state_ctx.all_states:
        for group in groups(inner):
            for p in group.fsdp_params:
                p.unsharded_accumulated_grad = None
                if hasattr(p, "_unsharded_param"):
                    p._unsharded_param.grad = None


def registers_post_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether FSDP2 hung its post-backward on one of these inputs of a forward."""
    tensors = releases.grad_tensors(args, kwargs)
    return any(t.grad_fn is not None and t.grad_fn.name() == "RegisterPostBackwardFunctionBackward" for t in tensors)


@dataclass(frozen=True, slots=True)
class ParamFacts:
    """One parameter of a group: its whole shape, where it is split, and its dtypes (orig, in compute, in reduction)."""

    shape: tuple[int, ...]
    shard_dim: int
    orig_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype


def owners(group: ParamGroup) -> list[tuple[nn.Module, str]]:
    """The module that holds each parameter, and the parameter's name there."""
    return [(p._module_info.module, p._module_info.param_name) for p in group.fsdp_params]


def parameters(group: ParamGroup) -> Iterator[nn.Parameter]:
    """Every face that the group's parameters may show in the model: sharded, and whole while gathered."""
    for p in group.fsdp_params:
        yield p.sharded_param
        if hasattr(p, "_unsharded_param"):
            yield p._unsharded_param


def origins(group: ParamGroup) -> list[int]:
    """A number for each parameter that tells which one it was before sharding; tied ones have the same."""
    return [releases.origin(p) for p in group.fsdp_params]


def trainable(group: ParamGroup) -> tuple[bool, ...]:
    """Whether each parameter of `group` requires a gradient now."""
    return tuple(p.sharded_param.requires_grad for p in group.fsdp_params)


def param_facts(group: ParamGroup) -> list[ParamFacts]:
    """Facts on every parameter of `group`, by position; valid before the first forward too. Equal ones are one object."""
    policy = group.mp_policy
    known: dict[tuple[torch.Size, int, torch.dtype], ParamFacts] = {}
    facts = []
    for p in group.fsdp_params:
        orig = p.sharded_param.dtype
        key = p._orig_size, p.fsdp_placement.dim, orig
        if key not in known:
            compute = policy.param_dtype if policy.param_dtype and orig.is_floating_point else orig
            known[key] = ParamFacts(tuple(key[0]), key[1], orig, compute, policy.reduce_dtype or compute)
        facts.append(known[key])
    return facts


@dataclass(frozen=True, slots=True)
class MeshFacts:
    """The process groups of one parameter group; None is an axis that its mesh lacks."""

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    reduce_scatter: dist.ProcessGroup | None


def mesh_facts(group: ParamGroup) -> MeshFacts:
    """The groups of `group`. `reduce_scatter` is the one of its own that a user may have asked for, else None."""
    info = group.mesh_info
    sharded = info if isinstance(info, common.FSDPMeshInfo) else None
    replicated = info if isinstance(info, common.DDPMeshInfo) else None
    return MeshFacts(
        sharded.shard_process_group if sharded else None,
        replicated.replicate_process_group if replicated else None,
        releases.own_reduce_scatter_group(sharded) if sharded else None,
    )


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """All global ranks of a mesh, ascending, and a name for it that is equal on each of them."""

    ranks: tuple[int, ...]
    identity: str


def mesh(group: ParamGroup) -> DeviceMesh:
    """The mesh over which `group` is spread."""
    return group.mesh_info.mesh


def mesh_coordinates(group: ParamGroup) -> dict[str, int]:
    """Where this rank is in the mesh of `group`, by the names of its dimensions."""
    of = mesh(group)
    return dict(zip(of.mesh_dim_names or (), of.get_coordinate() or (), strict=False))


def mesh_ranks(of: DeviceMesh) -> MeshRanks:
    """Who is in a mesh. Torch lays out every rank anew to answer: not to be asked for each parameter group."""
    laid_out = of.mesh
    digest = hashlib.sha256(repr(laid_out.tolist()).encode()).hexdigest()[:8]
    return MeshRanks(tuple(sorted(laid_out.flatten().tolist())), f"{','.join(of.mesh_dim_names or ())}@{digest}")


def refusals(group: ParamGroup) -> Iterator[str]:
    """Settings of `group` that a plan can't honour, in words."""
    if group._all_reduce_hook is not None:
        yield "has an all-reduce hook (set_all_reduce_hook), but a schedule owns its all-reduce; remove the hook"
    if (foreign := releases.foreign_reduce_scatter(group)) is not None:
        yield f"has a reduce-scatter of its own ({foreign}), which lanes can't drive; leave FSDP2's default"
    if group.gradient_divide_factor is not None and not releases.copies_lone_shards():
        sharded = mesh_facts(group).shard
        if sharded is None or sharded.size() == 1:
            yield "divides gradients by a factor of its own over a shard axis of one rank; this takes torch 2.10 or newer"


def scaling(group: ParamGroup) -> str:
    """What the gradients of `group` are divided by, in words; empty where FSDP2 decides."""
    divided = [] if group.gradient_divide_factor is None else [f"divided by {group.gradient_divide_factor}"]
    return ", ".join(divided + ["summed"] * group.force_sum_reduction_for_comms)


def settings(group: ParamGroup) -> str:
    """The settings of `group` that change its collectives, in words."""
    return (
        f"gradient divide factor {group.gradient_divide_factor}, sums forced {group.force_sum_reduction_for_comms}, "
        f"unused parameters reduced {releases.reduces_unused(group)}, "
        f"separate reduce-scatter group {mesh_facts(group).reduce_scatter is not None}"
    )


def replaced_attributes(owner: ParamGroup | State) -> tuple[str, ...]:
    """Methods that `attach` replaces, and that somebody replaced already on this very object."""
    names = ("pre_forward", "post_forward", "pre_backward", "post_backward", FINAL_CALLBACK)
    return tuple(name for name in names if name in vars(owner))


class Replacements:
    """Methods that were replaced on single objects, so that they can be put back."""

    def __init__(self) -> None:
        self._made: dict[str, list[object]] = {}

    def make(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """Let `owner.name` be `function` until `undo`."""
        assert name not in vars(owner)
        setattr(owner, name, function)
        self._made.setdefault(name, []).append(owner)

    def undo(self) -> None:
        """Restore every object."""
        while self._made:
            name, owners = self._made.popitem()
            for owner in owners:
                vars(owner).pop(name, None)
