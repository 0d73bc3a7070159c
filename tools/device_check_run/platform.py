"""The devices of this machine: which there are, and what the checks need of them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]

# Processes where there are not several devices: enough for a mesh of two by two.
NUM_SHARING = 4


@dataclass(frozen=True)
class Platform:
    """A kind of device.

    Attributes:
        kind: "cuda", "npu", or "recording": the CPU in the place of a device, for tests of this program.
        num_devices: how many there are.
        num_ranks: processes; with one device they share it, and gloo carries what they send.
        backend: of torch.distributed.
    """

    kind: str
    num_devices: int
    num_ranks: int
    backend: str

    @property
    def type(self) -> str:
        """The device's type in torch."""
        return "cpu" if self.kind == "recording" else self.kind

    def device(self, rank: int) -> torch.device:
        """The device of a rank."""
        return torch.device("cpu") if self.kind == "recording" else torch.device(self.kind, rank % self.num_devices)

    def module(self) -> Any:
        """What stands for the device in torch; loads what that takes."""
        if self.kind == "recording":
            sys.path.insert(0, str(REPOSITORY))
            fake = importlib.import_module("tests.devices.fake")
            return fake.FakeModule(fake.Pace.EAGER)
        load(self.kind)
        return torch.get_device_module(self.kind)

    def describe(self) -> str:
        """The device in words."""
        if self.kind == "recording":
            return "a recording device on the CPU"
        name = getattr(self.module(), "get_device_name", lambda _: self.kind)(0)
        return f"{self.num_devices} x {name}, {self.num_ranks} processes, {self.backend}"

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.kind != "recording":
            self.module().synchronize()

    def peak_bytes(self, *, restart: bool = False) -> int:
        """Most bytes that the allocator gave out at once since the last restart; 0 where it does not tell."""
        if self.kind == "recording":
            return 0
        module = self.module()
        peak = int(module.max_memory_allocated())
        if restart:
            module.reset_peak_memory_stats()
        return peak


def load(kind: str) -> bool:
    """Import what a kind of device needs; False if this machine lacks it."""
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError):
            return False
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (RuntimeError, AttributeError):
        return False


def find(kind: str) -> Platform | None:
    """The platform asked for; "auto": the first of CUDA and NPU that has a device."""
    if kind == "recording":
        return Platform(kind, 1, 2, "gloo")
    for candidate, backend in (("cuda", "nccl"), ("npu", "hccl")):
        if kind in {"auto", candidate} and load(candidate):
            num_devices = int(torch.get_device_module(candidate).device_count())
            if num_devices > 1:
                return Platform(candidate, num_devices, num_devices - num_devices % 2, backend)
            if num_devices == 1:
                return Platform(candidate, 1, NUM_SHARING, "gloo")
    return None
