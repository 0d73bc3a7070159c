"""What commplan takes from FSDP2 where a plan gathers parameters: the halves of its unshard, around the collective.

The rest is in `torch_private`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from commplan.fsdp2 import torch_releases as releases
from commplan.fsdp2.torch_private import ParamGroup, State


def shards_to_gather(group: ParamGroup) -> Sequence[torch.Tensor] | None:
    """This rank's flat shards in the dtype that compute uses; None where FSDP2 has to gather `group` by itself.

    It has to where parameters are whole or being gathered, where it was told not to gather in backward, where parameters were
    resharded over fewer ranks after forward, and where a tensor subclass brings an all-gather of its own.
    """
    if group.is_unsharded or group._all_gather_result is not None or not group.unshard_in_backward:
        return None
    params = group.fsdp_params
    if any(p.sharded_state is not ShardedState.SHARDED or _has_own_gather(p._sharded_local_tensor) for p in params):
        return None
    inputs = [shard for of_one in collectives._get_param_all_gather_inputs(params) for shard in of_one]
    return inputs if all(shard.dtype == inputs[0].dtype for shard in inputs) else None


AllGather = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], dist.Work | None]


def default_all_gather(group: ParamGroup) -> AllGather | None:
    """Starts FSDP2's own all-gather, (out, source, process group) -> work; None if a user put another in its place."""
    found = releases.default_all_gather(group)
    if found is None:
        return None
    return lambda out, source, process_group: found(out, source, group=process_group, async_op=True)


def set_whole(group: ParamGroup, gathered: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """The second half of FSDP2's unshard: split what was gathered, shape (ranks, elements of one), into whole parameters."""
    params = group.fsdp_params
    numels = [p._sharded_param_data.numel() for p in params]
    result = collectives.AllGatherResult(
        gathered, None, None, [[gathered.dtype] for _ in params], [[numel] for numel in numels], numels
    )
    collectives.foreach_all_gather_copy_out(result, params, process_group)
    for p in params:
        p.init_unsharded_param()
    group._to_unsharded()


def prefetches_in_backward(state: State) -> bool:
    """Whether a user told FSDP2 what to gather ahead in backward."""
    return bool(state._states_to_backward_prefetch)


def _has_own_gather(shard: torch.Tensor) -> bool:
    return hasattr(shard, "fsdp_pre_all_gather")
