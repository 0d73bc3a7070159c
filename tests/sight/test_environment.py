"""Environments that defeat overlap: one warning where it matters, none where it does not."""

from __future__ import annotations

import warnings

import pytest
import torch

from commplan.execute.environment import SETTINGS, obstacles, shortage_of_cores
from commplan.fsdp2.announce import warn_of_obstacles


@pytest.mark.parametrize(
    ("device", "environ", "named"),
    [
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["CUDA_DEVICE_MAX_CONNECTIONS=1"]),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, []),
        ("cuda", {"TORCH_NCCL_BLOCKING_WAIT": "1"}, ["TORCH_NCCL_BLOCKING_WAIT=1"]),
        ("cuda", {"NCCL_BLOCKING_WAIT": "1", "CUDA_LAUNCH_BLOCKING": "1"}, ["NCCL_BLOCKING_WAIT=1", "CUDA_LAUNCH_BLOCKING=1"]),
        ("cuda", {"TORCH_NCCL_BLOCKING_WAIT": "0", "CUDA_LAUNCH_BLOCKING": "0"}, []),
        ("cuda", {"HCCL_BLOCKING_WAIT": "1", "ASCEND_LAUNCH_BLOCKING": "1"}, []),
        (
            "npu",
            {"HCCL_BLOCKING_WAIT": "1", "TORCH_HCCL_BLOCKING_WAIT": "1"},
            ["TORCH_HCCL_BLOCKING_WAIT=1", "HCCL_BLOCKING_WAIT=1"],
        ),
        ("npu", {"ASCEND_LAUNCH_BLOCKING": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ["ASCEND_LAUNCH_BLOCKING=1"]),
        ("cpu", {setting.variable: "1" for setting in SETTINGS}, []),
        ("cuda", {}, []),
    ],
)
def test_what_defeats_overlap(device: str, environ: dict[str, str], named: list[str]) -> None:
    found = list(obstacles(device, environ))
    assert [text.split(" ")[0] for text in found] == named
    assert all("defeats overlap: " in text for text in found)


def attach(device: str) -> None:
    """Stands for `attach`, which a script calls."""
    warn_of_obstacles(torch.device(device))


@pytest.mark.report("verl-omni#421")
def test_one_warning_a_process_at_the_line_that_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            attach("cuda")
        for _ in range(3):
            attach("cpu")
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in str(warning.message)


@pytest.mark.parametrize(("num_lanes", "num_ranks", "is_short"), [(0, "1", False), (10_000, "1", True), (1, "10000", True)])
def test_cores_for_lanes(num_lanes: int, num_ranks: str, is_short: bool) -> None:
    assert bool(shortage_of_cores(num_lanes, {"LOCAL_WORLD_SIZE": num_ranks})) == is_short
