"""What commplan takes from FSDP2 where the plan leaves gathering to it: its unshard in backward, step for step.

On the same streams and in the same order, so that FSDP2 could go on at every point; what is the same in each backward is kept,
and ranges are made only where a profiler sees them. The rest is in `torch_private`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

from commplan.execute.packing import without_grad
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2 import torch_releases as releases
from commplan.fsdp2.torch_parameters import Parameters

_METHODS: Final = ("unshard", "wait_for_unshard", "_prefetch_unshard")


class _Begun(collectives.AllGatherResult):
    """What `Unshard` left with FSDP2, as FSDP2 would have."""


class Unshard:
    """The unshard of one group.

    Args:
        parameters: those of `group`.
    """

    def __init__(self, group: private.ParamGroup, parameters: Parameters) -> None:
        self._group = group
        self._parameters = parameters
        self._is_installed = False

    def install(self, replacements: private.Replacements) -> None:
        """Take the place of FSDP2's methods on the group; not where somebody else did, there or in the class."""
        group = self._group
        if any(name in vars(group) or not _is_of_torch(getattr(group, name)) for name in _METHODS):
            return
        replacements.make(group, "unshard", partial(self._unshard, group.unshard))
        replacements.make(group, "wait_for_unshard", partial(self._wait_for_unshard, group.wait_for_unshard))
        replacements.make(group, "_prefetch_unshard", partial(self._prefetch, group._prefetch_unshard))
        self._is_installed = True

    def pre_backward(self, original: Callable[..., None], default_prefetch: bool, *unused: object) -> None:
        """FSDP2's pre-backward."""
        group = self._group
        if not self._is_installed or releases.compiles_backward():
            original(default_prefetch, *unused)
            return
        # A module has one for each of its outputs.
        if group._training_state is common.TrainingState.PRE_BACKWARD:
            return
        with _range("FSDP::pre_backward", group):
            group._training_state = common.TrainingState.PRE_BACKWARD
            group.unshard(group.unshard_async_op)
            group.wait_for_unshard()
            if default_prefetch:
                group._backward_prefetch()

    def _prefetch(self, original: Callable[..., None], target: private.ParamGroup, pass_type: str) -> None:
        """FSDP2's unshard of the group whose backward comes next."""
        if pass_type != "backward":
            original(target, pass_type)
            return
        with _range("FSDP::backward_prefetch for ", target, "{}"):
            before, target._training_state = target._training_state, common.TrainingState.PRE_BACKWARD
            try:
                target.unshard(target.unshard_async_op)
            finally:
                target._training_state = before

    def _unshard(self, original: Callable[[bool], None], async_op: bool = False) -> None:
        if not self._may_take_over() or not self._begin(async_op):
            original(async_op)

    def _may_take_over(self) -> bool:
        group = self._group
        return (
            group._training_state is common.TrainingState.PRE_BACKWARD
            and group._all_gather_result is None
            and group.is_sharded
            # Shards of fewer ranks, which lie in memory that FSDP2 waits for.
            and group._reshard_after_forward_event is None
            and isinstance(group.mesh_info, common.FSDPMeshInfo)
            and group._all_gather_process_group.size() > 1
            # Whoever puts other functions into FSDP2 means them for backward, too.
            and getattr(param_group, "foreach_all_gather", None) is collectives.foreach_all_gather
            and getattr(param_group, "foreach_all_gather_copy_out", None) is collectives.foreach_all_gather_copy_out
            and not releases.compiles_backward()
        )

    def _begin(self, async_op: bool) -> bool:
        """Copy the shards in and start the all-gather; not where there is nothing to gather, or only FSDP2 knows how."""
        group = self._group
        process_group, module = group._all_gather_process_group, group.device_handle
        copy_in_stream, stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with _range("FSDP::all_gather", group):
            with without_grad(), module.stream(copy_in_stream):
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
        with _range("FSDP::all_gather_copy_out", group):
            module.current_stream().wait_event(begun.all_gather_event)
            if isinstance(begun.all_gather_work, dist.Work):
                begun.all_gather_work.wait()
            process_group = group._all_gather_process_group
            self._parameters.set_whole(begun.all_gather_output.view(process_group.size(), -1), process_group)
        copied = module.Event()
        copied.record()
        group._wait_all_gather_streams_on_event(copied)
        group._all_gather_result = None


def _is_of_torch(function: Callable[..., object]) -> bool:
    """Whether a function, or what is wrapped around it, is torch's."""
    found = getattr(function, "__globals__", {}).get("__name__", "")
    return found.startswith("torch.")


def _range(label: str, group: private.ParamGroup, shown: str = " ({})") -> AbstractContextManager[object]:
    """One of FSDP2's own, which FSDP2 makes whether or not a profiler is active; `shown`: how the module's name follows."""
    if not private.is_profiled():
        return nullcontext()
    name = group._module_fqn
    return torch.profiler.record_function(label + shown.format(name) if name else label)
