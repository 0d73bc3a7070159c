"""What commplan takes from FSDP2 on the way of a gradient: out of autograd, into a reduce-scatter, through factors, to `.grad`.

It repeats the halves of FSDP2's post-backward, between which a plan reduces. The rest is in `torch_private`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.tensor import DTensor

from commplan.fsdp2 import torch_devices as devices
from commplan.fsdp2 import torch_releases as releases
from commplan.fsdp2.torch_parameters import Parameters
from commplan.fsdp2.torch_private import ParamGroup

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


def take_gradients(group: ParamGroup, parameters: Parameters, *, keeps: bool = False) -> dict[int, torch.Tensor]:
    """The first half of FSDP2's post-backward: accumulate, reshard, and hand over what is complete.

    Args:
        parameters: those of `group`.
        keeps: as if gradients were not to be reduced in this backward, whatever FSDP2's flag says.

    Returns:
        Position -> whole gradient (the compute dtype, or the reduce dtype where microbatches were accumulated); empty
        where there is none, or where this backward only accumulates.
    """
    releases.end_recomputations(group)
    group._training_state = common.TrainingState.POST_BACKWARD
    taken: dict[int, torch.Tensor] = {}
    reduces_unused = releases.reduces_unused(group)
    reduces = group.reduce_grads and not keeps
    for position, p in enumerate(group.fsdp_params):
        # One that was never gathered has no gradient yet, and no place for one.
        whole = getattr(p, "_unsharded_param", None)
        if whole is None:
            continue
        if p.unsharded_accumulated_grad is not None:
            p.accumulate_unsharded_grad_if_needed()
            if reduces:
                taken[position] = p.unsharded_accumulated_grad_data
                p.unsharded_accumulated_grad = None
        elif not reduces:
            continue
        elif (gradient := whole.grad) is not None:
            taken[position] = p.unsharded_grad_data if p.is_dtensor else gradient
            whole.grad = None
        elif reduces_unused and whole.requires_grad:
            taken[position] = p.unsharded_zero_grad_data
    if group.reshard_after_backward:
        parameters.reshard()
    if not reduces:
        for p in group.fsdp_params:
            if hasattr(p, "_unsharded_param"):
                p.to_accumulated_grad_if_needed()
    return taken


def accumulated_bytes(group: ParamGroup) -> int:
    """Bytes of whole gradients that wait for a later backward."""
    return sum(p.unsharded_accumulated_grad_data.nbytes for p in group.fsdp_params if p.unsharded_accumulated_grad is not None)


def drop_grads(group: ParamGroup) -> None:
    """Set `.grad` of every parameter to None."""
    for p in group.fsdp_params:
        p.sharded_param.grad = None


def has_leftover(group: ParamGroup) -> bool:
    """Whether gradients arrived after the group's post-backward.

    FSDP2 registers none for the second of two recomputations of a module in one backward, and would lose them.
    """
    if not group.reduce_grads or group._training_state is not common.TrainingState.POST_BACKWARD:
        return False
    for p in group.fsdp_params:
        whole = getattr(p, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            return True
    return False


def shard_numel(group: ParamGroup, position: int, shard_size: int) -> int:
    """Elements of one parameter's flat shard, padding included."""
    p = group.fsdp_params[position]
    size = list(p._orig_size)
    dim = p.fsdp_placement.dim if shard_size > 1 else 0
    if dim != 0:
        # FSDP2 only splits another dimension evenly: no padding.
        return int(p._orig_size.numel()) // shard_size
    return int(common._get_dim0_padded_size(torch.Size(size), shard_size).numel()) // shard_size


def laid_out(gradients: dict[int, torch.Tensor], shard_dims: Mapping[int, int], shard_size: int) -> list[torch.Tensor]:
    """Whole gradients by position, each with what belongs to one rank behind what belongs to the rank before it; empties
    `gradients`.

    Args:
        shard_dims: position -> the dimension that is split, of parameters where it is not the first.
    """
    for position, dim in shard_dims.items():
        if shard_size > 1 and position in gradients:
            gradients[position] = torch.cat(torch.chunk(gradients[position], shard_size, dim=dim), dim=0)
    found = list(gradients.values())
    gradients.clear()
    return found


def take_as_sent(
    group: ParamGroup, gradients: dict[int, torch.Tensor], shard_size: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The only whole gradient, flat, if its elements lie as a reduce-scatter sends them and nobody else refers to them; empties
    `gradients`.
    """
    (position,) = gradients
    if shard_size > 1 and group.fsdp_params[position].fsdp_placement.dim != 0:
        return None
    gradient = gradients[position]
    if type(gradient) is not torch.Tensor or gradient.device.type != "cpu" or gradient.dtype != dtype:
        return None
    memory = gradient.untyped_storage()
    # What came from numpy or another library can't be resized: its owner may write to it again.
    is_own = memory.resizable() and not memory.is_shared() and memory.nbytes() == gradient.nbytes
    if not is_own or not gradient.is_contiguous() or gradient.is_neg():
        return None
    del gradient, memory
    held = [gradients.pop(position)]
    if _num_references(held) != _num_references([torch.empty(1, device="cpu")]):
        gradients[position] = held.pop()
        return None
    return held.pop().view(-1)


def _num_references(held: list[torch.Tensor]) -> tuple[int, int, int]:
    """To the only tensor in `held`, and to its memory; only to be compared with those of another tensor."""
    memory = held[0].untyped_storage()
    return sys.getrefcount(held[0]), sys.getrefcount(memory), torch._C._storage_Use_Count(memory._cdata)


def copy_in(gradients: Sequence[torch.Tensor], out: torch.Tensor, shard_size: int) -> None:
    """Lay whole gradients out as a reduce-scatter input, shape (shard_size * shard elements,)."""
    if len({gradient.dtype for gradient in gradients}) > 1:
        gradients = [gradient.to(out.dtype) for gradient in gradients]
    # What FSDP2's own op does, without an op around it.
    torch._chunk_cat(list(gradients), 0, shard_size, out=out.view(shard_size, -1))


@dataclass(frozen=True, slots=True)
class Factors:
    """What FSDP2 divides by before and after, and the reduce ops between."""

    predivide: float | None
    postdivide: float | None
    shard_op: ReduceOp
    replicate_op: ReduceOp
    local_divide: float | None


def scaling(group: ParamGroup) -> tuple[object, ...]:
    """The user's settings that `factors` depends on."""
    return group.gradient_divide_factor, group.force_sum_reduction_for_comms


def factors(
    group: ParamGroup, shard: dist.ProcessGroup | None, replicate: dist.ProcessGroup | None, dtype: torch.dtype
) -> Factors:
    """FSDP2's own choice for reducing `group` in `dtype` over these process groups (None: no such axis)."""
    pre, post, shard_op, replicate_op = collectives._get_gradient_divide_factors(
        shard,
        replicate,
        dtype,
        group.device.type,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )
    return Factors(pre, post, shard_op, replicate_op, group.gradient_divide_factor)


def reduce_scatter(
    group: ParamGroup, out: torch.Tensor, source: torch.Tensor, process_group: dist.ProcessGroup, op: ReduceOp
) -> dist.Work | None:
    """Start FSDP2's own reduce-scatter."""
    return releases.reduce_scatter(group, out, source, process_group, op)


def write_grads(group: ParamGroup, positions: Sequence[int], offsets: Sequence[int], flat: torch.Tensor) -> bool:
    """Set or accumulate `.grad` of sharded parameters, whose flat shards (orig dtype) begin at `offsets` of `flat`; run their
    hooks.

    Returns:
        True if some `.grad` is now a view of `flat`.
    """
    is_view = False
    base = flat.storage_offset()
    for position, offset in zip(positions, offsets, strict=True):
        p = group.fsdp_params[position]
        gradient = torch.as_strided(flat, p.sharded_size, p.contiguous_sharded_stride, base + offset)
        stays = not p.offload_to_cpu or flat.device.type == "cpu"
        if p.offload_to_cpu:
            gradient = devices.to_host(p, gradient)
        parameter = p.sharded_param
        if parameter.grad is None:
            # As FSDP2's `to_sharded_dtensor`, less a second half of the constructor that does nothing but keeps dynamo out.
            parameter.grad = DTensor.__new__(DTensor, gradient, p._sharding_spec, requires_grad=False)
            is_view |= stays
        else:
            assert isinstance(parameter.grad, DTensor)
            parameter.grad._local_tensor += gradient
        if hooks := getattr(parameter, "_post_accumulate_grad_hooks", None):
            for hook in hooks.values():
                hook(parameter)
    return is_view


def holds_partial_sum(group: ParamGroup) -> bool:
    """Whether FSDP2 itself keeps a shard that it did not all-reduce yet."""
    return group._partial_reduce_output is not None


def give_partial_sum(group: ParamGroup, shard: torch.Tensor) -> None:
    """Let FSDP2 keep this shard, as it would have itself."""
    group._partial_reduce_output = devices.of_reduce_stream(group, shard)
