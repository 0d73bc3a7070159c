"""What commplan takes from torch under names with an underscore for devices: groups that end, copies to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def abort_group(group: dist.ProcessGroup) -> None:
    """End the collectives of `group` that are under way on its devices; streams that wait for them go on, with garbage."""
    if hasattr(group, "abort"):
        group.abort()
        return
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if hasattr(backend, "abort"):
            backend.abort()
        elif hasattr(backend, "abort_hccl_comm"):
            backend.abort_hccl_comm("")


@contextlib.contextmanager
def unsplit() -> Iterator[None]:
    """Inside, a new group is not split off the default one: that is a collective of all ranks, members or not."""
    default = dist.distributed_c10d._get_default_group()
    bound = default.bound_device_id
    if bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def to_host(fsdp_param: Any, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of a reduced gradient on the host, where an offloaded parameter has its own.

    As FSDP2 does: beside the host where nobody there reads it before the end of backward (`finish_copies` waits for it),
    else the host waits.
    """
    parameter = fsdp_param.sharded_param
    has_hook = bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
    is_async = gradient.device.type != "cpu" and fsdp_param.pin_memory and parameter.grad is None and not has_hook
    copy = gradient.to(torch.device("cpu"), non_blocking=is_async)
    if is_async:
        stream = torch.get_device_module(gradient.device).current_stream(gradient.device)
        fsdp_param.grad_offload_event = stream.record_event()
    return copy


def is_offloaded(group: Any) -> bool:
    """Whether gradients of `group` live on the host."""
    return any(p.offload_to_cpu for p in group.fsdp_params)


def finish_copies(group: Any) -> None:
    """Hold the host until the copies of `to_host` are complete."""
    for p in group.fsdp_params:
        if p.grad_offload_event is not None:
            p.grad_offload_event.synchronize()
            p.grad_offload_event = None


def of_reduce_stream(group: Any, shard: torch.Tensor) -> torch.Tensor:
    """`shard`, in memory that belongs to the stream on which FSDP2 will read and release it."""
    if shard.device.type == "cpu" or not hasattr(group.comm_ctx, "reduce_scatter_stream"):
        return shard
    module = torch.get_device_module(shard.device)
    current, stream = module.current_stream(shard.device), group.comm_ctx.reduce_scatter_stream
    stream.wait_stream(current)
    with module.stream(stream):
        kept = shard.clone()
    current.wait_stream(stream)
    return kept
