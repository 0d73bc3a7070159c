"""Which torch releases commplan knows, and what differs between them under names with an underscore.

`require_known_torch` compares the functions that are relied on with those of releases that were read and tested; only then
may `torch_private` be used.  To support another release: read what changed in FSDP2, give every difference a function here,
run `tools/torch_matrix`, add its row to `RELEASES`.  docs/torch_releases.md tells how.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist

from commplan.errors import AttachError

FSDP2: Final = "torch.distributed.fsdp._fully_shard"

RELIED_ON: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        f"{FSDP2}._fsdp_param_group": (
            "FSDPParamGroup.pre_forward",
            "FSDPParamGroup.post_forward",
            "FSDPParamGroup.pre_backward",
            "FSDPParamGroup.post_backward",
            "FSDPParamGroup.finalize_backward",
            "FSDPParamGroup.reshard",
            "FSDPParamGroup.unshard",
            "FSDPParamGroup.wait_for_unshard",
            "FSDPParamGroup._register_post_backward_hook",
            "FSDPParamGroup._reset_iter_state",
            "FSDPParamGroup._reshard_after_forward",
            "FSDPParamGroup._to_sharded",
            "FSDPParamGroup._wait_all_gather_streams_on_event",
            "FSDPParamGroup._wait_for_post_backward",
            "FSDPParamGroup._to_unsharded",
            "FSDPParamGroup.is_sharded",
            "FSDPParamGroup.is_unsharded",
            "FSDPParamGroup._backward_prefetch",
            "FSDPParamGroup._prefetch_unshard",
            "FSDPParamGroup._all_gather_process_group",
            "FSDPCommContext.lazy_init",
            "FSDPCommContext.get_all_gather_streams",
        ),
        f"{FSDP2}._fsdp_state": (
            "FSDPState.init",
            "FSDPState._lazy_init",
            "FSDPState._init_shared_state",
            "FSDPState._root_pre_forward",
            "FSDPState._pre_forward",
            "FSDPState._pre_backward",
            "FSDPState._register_root_post_backward_final_callback",
            "FSDPState._root_post_backward_final_callback",
            "FSDPState._reset_iter_state",
            "FSDPState._fsdp_param_group",
        ),
        f"{FSDP2}._fsdp_param": (
            "FSDPParam.__init__",
            "FSDPParam._init_sharded_param",
            "FSDPParam.init_dtype_attrs",
            "FSDPParam.init_unsharded_param",
            "FSDPParam.accumulate_unsharded_grad_if_needed",
            "FSDPParam.to_accumulated_grad_if_needed",
            "FSDPParam.to_sharded_dtensor",
            "FSDPParam.to_sharded",
            "FSDPParam.to_unsharded",
            "FSDPParam._setattr_on_modules",
            "FSDPParam.init_all_gather_outputs",
            "FSDPParam.free_unsharded_param",
            "FSDPParam.all_gather_inputs",
            "FSDPParam._sharded_local_tensor",
            "FSDPParam.to_sharded_post_forward",
            "FSDPParam.unsharded_param",
            "FSDPParam.unsharded_accumulated_grad_data",
            "FSDPParam.unsharded_grad_data",
            "FSDPParam.unsharded_zero_grad_data",
            "FSDPParam._get_grad_inner_tensor",
            "_get_orig_param_uid",
            "alloc_storage",
            "free_storage",
            "set_requires_grad_if_needed",
            "unsafe_setattr_param",
        ),
        f"{FSDP2}._fsdp_collectives": (
            "DefaultAllGather.__call__",
            "DefaultAllocMixin.allocate",
            "DefaultReduceScatter.__call__",
            "_get_gradient_divide_factors",
            "foreach_all_gather",
            "foreach_all_gather_copy_out",
            "foreach_reduce_scatter_copy_in",
            "_get_param_all_gather_inputs",
            "chunk_cat",
            "split_with_sizes_copy",
        ),
        f"{FSDP2}._fsdp_common": (
            "DDPMeshInfo.__post_init__",
            "FSDPMeshInfo.__post_init__",
            "_dynamo_disable",
            "_from_local_no_grad",
            "compiled_autograd_enabled",
            "_get_dim0_padded_size",
            "is_bw",
        ),
        f"{FSDP2}._fully_shard": ("FSDPModule._get_fsdp_state",),
        "torch.distributed.fsdp._common_utils": ("collect_grad_tensors",),
        "torch.distributed.distributed_c10d": (
            "_device_capability",
            "_get_default_group",
            "_get_default_store",
            "_new_process_group_helper",
            "get_process_group_ranks",
        ),
        "torch.distributed": ("_spmd_no_typecheck",),
        "torch.autograd.profiler": ("_set_is_profiler_enabled",),
        "torch._tensor": ("Tensor.register_post_accumulate_grad_hook",),
        "torch.utils._pytree": ("tree_leaves",),
    }
)
"""Functions that commplan replaces, repeats or calls, and those that say what the attributes mean that it reads and sets, by
module; a release may lack some.

`foreach_reduce` is not called, and so may be wrapped.
"""

RELEASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "2.11": "cb68d366f70c9ae5",
        "2.12": "e37f6d691f482d1b",
        "2.13": "4359290b100a7e18",
        "2.14": "70c548ae3f325790",
    }
)
"""Release -> its fingerprint. A row stands for a release that was read, and whose tests passed."""

WRAPPERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "d39c459ec583cc03": "_wait_all_gather_streams_on_event in torch-npu 2.10 to 2.14",
        "192c362fc92fd63e": "post_forward in torch-npu 2.10 to 2.14",
        "b01c2cc280c3be51": "post_backward in torch-npu 2.10 to 2.14",
    }
)
"""Fingerprints of functions in which a vendor wraps one that is relied on, where what is inside is checked instead."""

REPLACEMENTS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        # _new_process_group_helper in torch-npu 2.11 and 2.12, and in 2.13: HCCL in, torchcomms out.
        "0321d0c5873e6f5e": {"2.11": "92902daa34130168", "2.12": "3787a3a07505fde1"},
        "278b04aa31101b2a": {"2.13": "1cc73639369fbce9"},
    }
)
"""Fingerprint of a function of a vendor's -> release -> fingerprint of the one whose place it takes, for the same use."""


def release() -> tuple[int, ...]:
    """Major and minor number of this torch; empty if its version has none."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return tuple(map(int, found.groups())) if found else ()


def fingerprint(relied_on: Mapping[str, tuple[str, ...]] = RELIED_ON) -> str:
    """A digest of the functions' code, the same under every Python.

    Comments, docstrings and layout do not count, nor do decorators that keep `__wrapped__`.

    Raises:
        OSError, TypeError, SyntaxError, ImportError: there is no source to read.
    """
    lines = []
    for module_name, names in relied_on.items():
        module = importlib.import_module(module_name)
        for name in names:
            code = _code(module, name)
            found = "absent" if code is None else _short_digest(code)
            lines.append(f"{name}: {REPLACEMENTS.get(found, {}).get(_release_name(), found)}\n")
    return _short_digest("".join(lines))


def require_known_torch() -> None:
    """Check that this torch is one that commplan was written for.

    Raises:
        AttachError: says which torch it found and which it knows.
    """
    known = ", ".join(RELEASES)
    expected = RELEASES.get(_release_name())
    if expected is None:
        raise AttachError(f"commplan does not know torch {torch.__version__}; needed: torch {known}")
    try:
        found = fingerprint()
    except (OSError, TypeError, SyntaxError, ImportError) as error:
        raise AttachError(f"can't read FSDP2's source in torch {torch.__version__} ({error}); needed: torch {known}") from error
    if found != expected:
        raise AttachError(
            f"torch {torch.__version__} has an FSDP2 that commplan does not know (fingerprint {found}, released {expected}); "
            f"needed: torch {known}, with FSDP2's functions as released"
        )


def _release_name() -> str:
    return ".".join(map(str, release()))


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code(module: Any, name: str) -> str | None:
    """The code of a function or property, where a vendor wraps it of what is inside; None if there is none."""
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        return None
    code = _source(found)
    while _short_digest(code) in WRAPPERS:
        (cell,) = inspect.unwrap(found).__closure__
        found = cell.cell_contents
        code = _source(found)
    return code


def _source(function: Any) -> str:
    code = getattr(inspect.unwrap(getattr(function, "fget", function)), "__code__", None)
    if code is None:
        raise TypeError(f"{function} is no function of Python")
    return _source_of(code, code.co_filename)


@functools.cache
def _source_of(code: CodeType, file: str) -> str:
    """Read once in a process: a function that takes its place has other code, or is from another file."""
    return _canonical(ast.parse(textwrap.dedent(inspect.getsource(code))))


def _canonical(node: object) -> str:
    """What `ast.dump` shows, less what differs between Python's releases or does not run."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
        if _has_docstring(node):
            fields = [(name, value[1:] if name == "body" else value) for name, value in fields]
        return f"{type(node).__name__}({', '.join(f'{name}={_canonical(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_canonical, node))}]"
    return repr(node)


def _has_docstring(node: ast.AST) -> bool:
    """Whether `node` is a function or class that begins with a docstring."""
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None


# Differences. Objects are FSDP2's own: states, parameter groups, parameters.


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of one state, in forward order. Up to 2.11 a state has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def has_groups_over_several_meshes() -> bool:
    """Whether `shard_placement_fn` may send parameters of one module to different meshes, which it may since 2.12."""
    return hasattr(importlib.import_module(f"{FSDP2}._fsdp_common"), "ShardPlacementResult")


def remembers_ties() -> bool:
    """Whether FSDP2 still knows after sharding which parameters were tied, which it does since 2.12."""
    return hasattr(importlib.import_module(f"{FSDP2}._fsdp_param"), "_get_orig_param_uid")


def origin(param: Any) -> int:
    """A number that tells which parameter this was before sharding; without `remembers_ties` each has one of its own."""
    return getattr(param, "_orig_param_uid", id(param))


def grad_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among a forward's inputs that FSDP2 hangs its post-backward on; up to 2.11 it sees no dataclasses."""
    common_utils = importlib.import_module("torch.distributed.fsdp._common_utils")
    if hasattr(common_utils, "collect_grad_tensors"):
        yield from common_utils.collect_grad_tensors((args, kwargs))
        return
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf


def own_reduce_scatter_group(mesh_info: Any) -> dist.ProcessGroup | None:
    """The group for reduce-scatters that a user may ask for since 2.13."""
    return getattr(mesh_info, "reduce_scatter_process_group", None)


def reduces_unused(group: Any) -> bool:
    """Whether parameters without a gradient are reduced as zeros, which a user may ask for since 2.13."""
    return getattr(group, "reduce_scatter_unused_params", False)


def reduce_scatter(group: Any, out: torch.Tensor, source: torch.Tensor, process_group: dist.ProcessGroup, op: Any) -> Any:
    """Start FSDP2's own reduce-scatter; up to 2.8 it can't be replaced by a user's."""
    if hasattr(group, "_reduce_scatter_comm"):
        return group._reduce_scatter_comm(output_tensor=out, input_tensor=source, group=process_group, op=op, async_op=True)
    return dist.reduce_scatter_tensor(output=out, input=source, group=process_group, op=op, async_op=True)


def foreign_reduce_scatter(group: Any) -> str | None:
    """The name of a reduce-scatter that is not FSDP2's default, if a user asked for one."""
    if hasattr(group, "_reduce_scatter_comm"):
        kind = type(group._reduce_scatter_comm)
        return None if kind is _default_reduce_scatter() else kind.__name__
    return "memory of the process group" if group.allocate_memory_from_process_group else None


@functools.cache
def _default_reduce_scatter() -> type:
    found: type = importlib.import_module(f"{FSDP2}._fsdp_collectives").DefaultReduceScatter
    return found


def default_all_gather(group: Any) -> Callable[..., Any] | None:
    """FSDP2's own all-gather of `group`; None if a user put another in its place, which is possible from 2.9 on."""
    if not hasattr(group, "_all_gather_comm"):
        return dist.all_gather_into_tensor
    collectives = importlib.import_module(f"{FSDP2}._fsdp_collectives")
    found: Callable[..., Any] = group._all_gather_comm
    return found if type(found) is collectives.DefaultAllGather else None


def end_recomputations(group: Any) -> None:
    """What torch-npu's `fully_shard` does in front of a post-backward since 2.10: recomputed forwards reshard nothing."""
    if hasattr(group, "_skip_post_forward"):
        group._skip_post_forward = False


def copies_lone_shards() -> bool:
    """Whether a shard axis of one rank is reduced by a copy (since 2.10), not by a collective."""
    return release() >= (2, 10)


def compiles_backward() -> bool:
    """Whether compiled autograd traces FSDP2's hooks, which it can up to 2.11."""
    is_enabled = _is_compiled_autograd_enabled()
    return is_enabled is not None and is_enabled()


@functools.cache
def _is_compiled_autograd_enabled() -> Callable[[], bool] | None:
    return getattr(importlib.import_module(f"{FSDP2}._fsdp_common"), "compiled_autograd_enabled", None)


def guards_from_dynamo() -> tuple[object, ...]:
    """The code of FSDP2's guards from torch.compile, among other things; up to 2.11 it has others, which are left alone."""
    common = importlib.import_module(f"{FSDP2}._fsdp_common")
    return common._dynamo_disable.__code__.co_consts if hasattr(common, "_dynamo_disable") else ()


def has_typecheck() -> bool:
    """Whether a user may ask for type checks of distributed tensors, which is possible since 2.14."""
    return hasattr(dist, "_spmd_no_typecheck")


def no_typecheck() -> contextlib.AbstractContextManager[None]:
    """What FSDP2 does around its hooks where there are such checks: they leave them out."""
    guard = getattr(dist, "_spmd_no_typecheck", contextlib.nullcontext)
    return guard()


def resets_iterations() -> bool:
    """Whether FSDP2 can forget an iteration that ended in an exception, which it can since 2.13."""
    return hasattr(importlib.import_module(f"{FSDP2}._fsdp_state").FSDPState, "_reset_iter_state")


def reset_iteration(root: Any) -> None:
    """Let a root forget an iteration that ended in an exception; before 2.13 FSDP2 can't do so by itself."""
    if resets_iterations():
        # The class's own: on this object, a driver is told of what its user forgets.
        type(root)._reset_iter_state(root)
    else:
        reset_by_hand(root)


def reset_by_hand(root: Any) -> None:
    """What FSDP2's `reset_iter_state` does since 2.13, for releases without it."""
    training_state = importlib.import_module(f"{FSDP2}._fsdp_common").TrainingState
    shared = root._comm_ctx
    stream = root._device_handle.current_stream()
    lists = getattr(shared, "reduce_scatter_states", None)
    retained = [shared.reduce_scatter_state] if lists is None else list(lists)
    for event in (held.event for held in (shared.all_gather_state, *retained) if held is not None):
        if event is not None:
            stream.wait_event(event)
    shared.all_gather_state = None
    if lists is None:
        shared.reduce_scatter_state = None
    else:
        lists.clear()
    shared.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = training_state.IDLE
        for group in param_groups(state):
            _reset_group(group, stream)
            group._training_state = training_state.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    """Wait for what a group has in flight, then drop it, its partial sum included."""
    gathered, reduced = group._all_gather_result, group._all_reduce_state
    events = [gathered and gathered.all_gather_event, group._post_reduce_event, reduced and reduced.event]
    for event in events:
        if event is not None:
            stream.wait_event(event)
    if gathered is not None and isinstance(gathered.all_gather_work, dist.Work):
        gathered.all_gather_work.wait()
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
