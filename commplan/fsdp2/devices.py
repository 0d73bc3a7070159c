"""What differs between devices: which lanes run a plan there, and how process groups for them are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from commplan.execute.lanes import Lanes
from commplan.execute.streams import DeviceHooks, StreamLanes
from commplan.execute.workers import WorkerLanes
from commplan.fsdp2 import torch_devices

# What lanes ask of a device's module in torch.
NEEDED = ("Stream", "Event", "current_stream", "stream", "set_device")

# How much longer than a plan's own timeout a group of a device waits for its peers: its own remedy is to end the process.
GROUP_PATIENCE_S = 120.0


def lanes_for(device: torch.device, timeout_s: float) -> Lanes:
    """In-order workers on a CPU, streams with events elsewhere."""
    if device.type == "cpu":
        return WorkerLanes(timeout_s)
    return StreamLanes(device, timeout_s, DeviceHooks(abort=torch_devices.abort_group))


def device_problems(device_of: Mapping[str, torch.device]) -> Iterator[str]:
    """Why a plan can't run where these modules are, in words."""
    for name, device in device_of.items():
        if device.type == "meta":
            yield f"module {name!r} is on the meta device: give its parameters memory (to_empty, then initialise) before attach"
        elif lacking := _lacking(device):
            yield (
                f"module {name!r} is on {device}, whose module in torch lacks {', '.join(lacking)}: "
                "schedules run on CPU, and on devices with streams and events, as CUDA's and NPU's"
            )
    devices: dict[torch.device, str] = {}
    for name, device in device_of.items():
        devices.setdefault(device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        yield f"the model lies on {len(devices)} devices ({where}): one process drives one device"


def _lacking(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return []
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return ["everything"]
    return [name for name in NEEDED if not hasattr(module, name)]


def backend_for(model: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that `model` uses for tensors of `device`."""
    for part in dist.get_backend_config(model).split(","):
        kind, _, backend = part.rpartition(":")
        if kind in {"", device.type}:
            return backend
    return dist.get_backend(model)


def group_timeout(backend: str, timeout_s: float) -> timedelta:
    """How long a group's own collectives may take.

    gloo raises an error that names the collective.  Those of devices end the process instead, so the lanes' watchdog has to
    come first.
    """
    return timedelta(seconds=timeout_s if backend == "gloo" else timeout_s + GROUP_PATIENCE_S)
