"""What commplan takes from FSDP2 where parameters become whole in backward, and shards again: the halves of its unshard, around
the collective, and its reshard.

The rest is in `torch_private`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard import _fsdp_param as param

from commplan.fsdp2 import torch_releases as releases
from commplan.fsdp2.torch_private import ParamGroup, State

AllGather = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], dist.Work | None]


def default_all_gather(group: ParamGroup) -> AllGather | None:
    """Starts FSDP2's own all-gather, (out, source, process group) -> work; None if a user put another in its place."""
    found = releases.default_all_gather(group)
    if found is None:
        return None
    return lambda out, source, process_group: found(out, source, group=process_group, async_op=True)


class Parameters:
    """The parameters of one group on their way through an all-gather; keeps what is the same each time."""

    def __init__(self, group: ParamGroup) -> None:
        self._group = group
        self._numels: list[int] = []
        self._outputs: list[torch.Tensor] = []
        self._memory: list[tuple[torch.UntypedStorage, int]] = []
        self._rows: list[torch.Tensor] = []
        self._holders: list[list[tuple[nn.Module, str]]] = []
        # Shards that may be sent as they are, not ours to keep; looked at closely once, for as long as they are the same.
        self._plain: list[weakref.ref[torch.Tensor]] = []

    def shards_to_gather(self) -> Sequence[torch.Tensor] | None:
        """This rank's flat shards in the dtype that compute uses; None where FSDP2 has to gather the group by itself.

        It has to where parameters are whole or being gathered, where it was told not to gather in backward, where parameters
        were resharded over fewer ranks after forward, and where a tensor subclass brings an all-gather of its own.
        """
        group, params = self._group, self._group.fsdp_params
        if group._all_gather_result is not None or not group.is_sharded or not group.unshard_in_backward:
            return None
        shards = [p._sharded_param_data for p in params]
        if len(shards) == len(self._plain) and all(map(operator.is_, shards, map(operator.call, self._plain))):
            return shards
        if not any(shard.numel() for shard in shards):
            return None
        if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in params):
            return None
        if len({p.param_dtype or shard.dtype for p, shard in zip(params, shards, strict=True)}) > 1:
            return None
        if all(p.param_dtype is None and not p.offload_to_cpu for p in params):
            self._plain = list(map(weakref.ref, shards))
            return shards
        return [shard for of_one in collectives._get_param_all_gather_inputs(params) for shard in of_one]

    def place_to_gather(self) -> torch.Tensor | None:
        """The memory of the whole parameter, if there is one alone and it lies as it is gathered."""
        if len(self._group.fsdp_params) != 1 or not self._has_outputs():
            return None
        self._give_memory()
        return self._rows[0].view(-1)

    def leave_place(self) -> None:
        """Free the memory again, whose content nobody needs."""
        self._outputs[0].untyped_storage().resize_(0)

    def set_whole(self, gathered: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        """The second half of FSDP2's unshard: split what was gathered, shape (ranks, elements of one), into parameters."""
        if not self._has_outputs():
            self._set_by_fsdp2(gathered, process_group)
        elif gathered.data_ptr() != self._outputs[0].data_ptr():
            self._give_memory()
            torch.split_with_sizes_copy(gathered, self._numels, dim=1, out=self._rows)
        self._show_whole()

    def _show_whole(self) -> None:
        """FSDP2's `_to_unsharded`: modules hold whole parameters from here on."""
        group = self._group
        if not group.is_sharded or not self._holders:
            group._to_unsharded()
            return
        for p, holders in zip(group.fsdp_params, self._holders, strict=True):
            shard, whole = p.sharded_param, p._unsharded_param
            if whole.requires_grad != shard.requires_grad:
                whole.requires_grad_(shard.requires_grad)
            for module, name in holders:
                module._parameters[name] = whole
            p.sharded_state = param.ShardedState.UNSHARDED
        group._sharded_state = param.ShardedState.UNSHARDED

    def reshard(self) -> None:
        """FSDP2's `reshard` after a backward: modules hold shards, and the memory of whole parameters is free."""
        group = self._group
        if not group.is_unsharded or not self._holders or releases.compiles_backward():
            group.reshard()
            return
        known = zip(group.fsdp_params, self._holders, self._outputs, self._memory, strict=True)
        for p, holders, output, (storage, _) in known:
            if p.all_gather_outputs[0] is not output:
                # It begins with the first one again.
                group.reshard()
                return
            for module, name in holders:
                module._parameters[name] = p.sharded_param
            if storage.size() != 0:
                storage.resize_(0)
            p.sharded_state = param.ShardedState.SHARDED
        group._sharded_state = param.ShardedState.SHARDED

    def _give_memory(self) -> None:
        """As FSDP2's `alloc_storage`."""
        for storage, size_bytes in self._memory:
            if storage.size() != size_bytes:
                storage.resize_(size_bytes)

    def _has_outputs(self) -> bool:
        """Whether FSDP2 has made the tensors that whole parameters are, and what is gathered can be copied there at once."""
        params = self._group.fsdp_params
        if releases.compiles_backward():
            # Whole parameters then lie elsewhere.
            return False
        if self._outputs and all(map(operator.is_, [p.all_gather_outputs[0] for p in params], self._outputs)):
            return True
        if any(not hasattr(p, "_unsharded_param") or p.fsdp_placement.dim != 0 for p in params):
            return False
        self._numels = [p._sharded_param_data.numel() for p in params]
        self._outputs = [p.all_gather_outputs[0] for p in params]
        self._memory = [(output.untyped_storage(), output.nbytes) for output in self._outputs]
        num_ranks = self._group._all_gather_process_group.size()
        # Under versions of their own: autograd must not take what arrives for a change of what forward saved.
        self._rows = [output.data.view(num_ranks, -1) for output in self._outputs]
        self._holders = _holders(params) if self._is_plain() else []
        return True

    def _is_plain(self) -> bool:
        """Whether nobody put a method of his own on these objects that FSDP2 would call."""
        names = "reshard", "_to_sharded", "_to_unsharded", "to_sharded", "to_unsharded"
        return not any(name in vars(owner) for owner in (self._group, *self._group.fsdp_params) for name in names)

    def _set_by_fsdp2(self, gathered: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        params = self._group.fsdp_params
        numels = [p._sharded_param_data.numel() for p in params]
        dtypes = [[gathered.dtype] for _ in params]
        result = collectives.AllGatherResult(gathered, None, None, dtypes, [[numel] for numel in numels], numels)
        collectives.foreach_all_gather_copy_out(result, params, process_group)
        for p in params:
            p.init_unsharded_param()


def _holders(params: Sequence[param.FSDPParam]) -> list[list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, and its name there; nothing if a class brings its own `__setattr__` for them."""
    found = []
    for info in (p._module_info for p in params):
        names = info.param_name, *info.shared_param_names
        found.append(list(zip((info.module, *info.shared_modules), names, strict=True)))
    is_plain = all(type(module).__setattr__ is nn.Module.__setattr__ for holders in found for module, _ in holders)
    return found if is_plain else []


def begin_backward(group: ParamGroup) -> bool:
    """What FSDP2's pre-backward does where parameters are whole and nothing is to be gathered ahead.

    Returns:
        Whether they are; if not, nothing was done.
    """
    if not group.is_unsharded or group._all_gather_result is not None:
        return False
    group._training_state = common.TrainingState.PRE_BACKWARD
    return True


def prefetches_in_backward(state: State) -> bool:
    """Whether a user told FSDP2 what to gather ahead in backward."""
    return bool(state._states_to_backward_prefetch)
