"""What is told of a profile: where it is from, and what came of it."""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import commplan
from commplan.bench.stepping import in_words
from commplan.calibrate.figures import Measurements, transfers
from commplan.fsdp2.devices import backend_for


def source(command: str, num_steps: int, model: nn.Module, device: torch.device) -> list[str]:
    """Machine, versions and command, in lines."""
    backend = backend_for(cast(Any, dist.group.WORLD), device)
    kind = _processor()
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)()
        kind = f"{name}; host: {kind}"
    hosts = max(1, dist.get_world_size() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()))
    return [
        f"measured by: {command}",
        f"date: {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"model: {in_words(model)}",
        f"job: {dist.get_world_size()} ranks on {hosts} host(s), backend {backend}, {num_steps} steps of each kind",
        f"machine: {kind}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, {platform.machine()}",
        f"versions: commplan {commplan.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    ]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.processor() or "a processor of unknown name"


def summary(measured: Measurements, seconds: float) -> list[str]:
    """What came of it, in a few lines; it took `seconds`."""
    alone_s = sum(spread.median_s for spread in measured.compute.values())
    rates = ", ".join(f"{kind} over {axis} {rate / 1e9:.3g} GB/s" for (axis, kind), rate in transfers(measured).items())
    num = statistics.median([spread.num for spread in measured.compute.values()] or [0])
    return [
        f"{measured.name}",
        f"compute of a backward alone {alone_s * 1e3:.1f} ms (medians of {num:.0f}); {rates or 'no axis of several ranks'}",
        f"measured in {seconds:.0f} s",
    ]
