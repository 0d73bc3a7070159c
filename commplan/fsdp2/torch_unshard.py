"""What commplan takes from FSDP2 where the plan leaves gathering to it: its unshard in backward, step for step.

On the same streams and in the same order, so that FSDP2 could go on at every point; what is the same in each backward is kept,
and ranges are made where a profiler sees them. The rest is in `torch_private`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common

from commplan.fsdp2 import torch_private as private
from commplan.fsdp2 import torch_releases as releases
from commplan.fsdp2.torch_parameters import Parameters

_REPLACED: Final = ("unshard", "wait_for_unshard", "_prefetch_unshard")


class _Begun(collectives.AllGatherResult):
    """What `Unshard` left with FSDP2, as FSDP2 would have."""


class Unshard:
    """The unshard of one group.

    Args:
        name: of the sharded module.
        parameters: those of `group`.
    """

    def __init__(self, group: private.ParamGroup, name: str, parameters: Parameters) -> None:
        self._group = group
        self._name = name
        self._parameters = parameters
        self._is_installed = False

    def install(self, replacements: private.Replacements) -> None:
        """Take the place of FSDP2's methods on the group; not where somebody did before."""
        group = self._group
        if any(name in vars(group) for name in _REPLACED):
            return
        replacements.make(group, "unshard", partial(self._unshard, group.unshard))
        replacements.make(group, "wait_for_unshard", partial(self._wait_for_unshard, group.wait_for_unshard))
        replacements.make(group, "_prefetch_unshard", self._prefetch)
        self._is_installed = True

    def pre_backward(self, original: Callable[..., None], default_prefetch: bool, *unused: object) -> None:
        """FSDP2's pre-backward."""
        group = self._group
        if not self._is_installed or releases.compiles_backward():
            original(default_prefetch, *unused)
            return
        if group._training_state is common.TrainingState.PRE_BACKWARD:
            return
        with private.profiler_range(f"FSDP::pre_backward ({self._name})"):
            group._training_state = common.TrainingState.PRE_BACKWARD
            group.unshard(group.unshard_async_op)
            group.wait_for_unshard()
            if default_prefetch:
                group._backward_prefetch()

    def _prefetch(self, target: private.ParamGroup, pass_type: str) -> None:
        """FSDP2's unshard of what the group's backward comes before."""
        assert pass_type == "backward"
        with private.profiler_range(f"FSDP::backward_prefetch by {self._name}"):
            before, target._training_state = target._training_state, common.TrainingState.PRE_BACKWARD
            try:
                target.unshard(target.unshard_async_op)
            finally:
                target._training_state = before

    def _unshard(self, original: Callable[[bool], None], async_op: bool = False) -> None:
        group = self._group
        is_in_backward = group._training_state is common.TrainingState.PRE_BACKWARD
        # Where shards of a smaller mesh are gathered, whose ranks differ, there is an event to wait for.
        if not is_in_backward or group._reshard_after_forward_event is not None or not self._begin(async_op):
            original(async_op)

    def _begin(self, async_op: bool) -> bool:
        """Copy the shards in and start the all-gather; not where FSDP2 has nothing to gather or another way to do it."""
        group = self._group
        if not isinstance(group.mesh_info, common.FSDPMeshInfo) or group._all_gather_process_group.size() == 1:
            return False
        process_group, module = group._all_gather_process_group, group.device_handle
        copy_in_stream, stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with torch.no_grad(), module.stream(copy_in_stream):
            shards = self._parameters.shards_to_gather()
            if shards is None:
                return False
            numels = [shard.numel() for shard in shards]
            numel, dtype = sum(numels), shards[0].dtype
            gather = group._all_gather_comm
            buffer = gather.allocate((numel * process_group.size(),), dtype=dtype, device=group.device)
            own = buffer.narrow(0, process_group.rank() * numel, numel)
            torch.cat(list(shards), out=own)
            del shards
        stream.wait_stream(copy_in_stream)
        with module.stream(stream):
            work = gather(output_tensor=buffer, input_tensor=own, group=process_group, async_op=async_op)
            event = stream.record_event()
        dtypes, numels_of = [[dtype]] * len(numels), [[of_one] for of_one in numels]
        group._all_gather_result = _Begun(buffer, event, work, dtypes, numels_of, numels)
        return True

    def _wait_for_unshard(self, original: Callable[[], None]) -> None:
        begun, state = self._group._all_gather_result, self._group._training_state
        if isinstance(begun, _Begun) and state is common.TrainingState.PRE_BACKWARD:
            self._finish(begun)
        else:
            original()

    def _finish(self, begun: _Begun) -> None:
        """Wait, and copy out."""
        group, module = self._group, self._group.device_handle
        module.current_stream().wait_event(begun.all_gather_event)
        if begun.all_gather_work is not None:
            begun.all_gather_work.wait()
        process_group = group._all_gather_process_group
        self._parameters.set_whole(begun.all_gather_output.view(process_group.size(), -1), process_group)
        copied = module.Event()
        copied.record()
        group._wait_all_gather_streams_on_event(copied)
        group._all_gather_result = None
