"""Settings of the environment that take away what a schedule is for: collectives that run beside compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable that defeats overlap on some types of device, when its value is one of those; `does` says how."""

    variable: str
    devices: frozenset[str]
    defeats: Callable[[str], bool]
    does: str


def _is_one(value: str) -> bool:
    return value.strip() == "1"


def _is_on(value: str) -> bool:
    return value.strip().lower() not in {"", "0", "false", "no", "n", "off"}


_CUDA: Final = frozenset({"cuda"})
_NPU: Final = frozenset({"npu"})

_BLOCKING_WAIT: Final = "the host stands still until each collective is over, so nothing is issued meanwhile"
_BLOCKING_LAUNCH: Final = "the host stands still until each kernel is over, so no two of them overlap"

SETTINGS: Final = (
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _CUDA,
        _is_one,
        "all streams share one queue of the device, so a collective starts only when compute that was issued before it has "
        "(Megatron's tensor parallelism asks for it, FSDP must not have it)",
    ),
    Setting("TORCH_NCCL_BLOCKING_WAIT", _CUDA, _is_on, _BLOCKING_WAIT),
    Setting("NCCL_BLOCKING_WAIT", _CUDA, _is_on, _BLOCKING_WAIT),
    Setting("CUDA_LAUNCH_BLOCKING", _CUDA, _is_on, _BLOCKING_LAUNCH),
    Setting("TORCH_HCCL_BLOCKING_WAIT", _NPU, _is_on, _BLOCKING_WAIT),
    Setting("HCCL_BLOCKING_WAIT", _NPU, _is_on, _BLOCKING_WAIT),
    Setting("ASCEND_LAUNCH_BLOCKING", _NPU, _is_on, _BLOCKING_LAUNCH),
)


def obstacles(device_type: str, environ: Mapping[str, str]) -> Iterator[str]:
    """What defeats overlap on devices of this type, each in a sentence."""
    for setting in SETTINGS:
        value = environ.get(setting.variable)
        if value is not None and device_type in setting.devices and setting.defeats(value):
            yield f"{setting.variable}={value} defeats overlap: {setting.does}. Unset it before the process starts."


def shortage_of_cores(num_lanes: int, environ: Mapping[str, str]) -> str:
    """Whether lanes on a CPU have too few cores to run beside compute, in a sentence; else empty.

    Args:
        num_lanes: without compute's.
    """
    num_ranks = int(value) if (value := environ.get("LOCAL_WORLD_SIZE", "1")).isdecimal() else 1
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = num_ranks * (num_lanes + 1)
    if num_threads <= num_cores:
        return ""
    return (
        f"{num_cores} core(s) for {num_ranks} rank(s) of this host, each with compute and {num_lanes} lane(s): they take turns "
        "rather than overlap"
    )
