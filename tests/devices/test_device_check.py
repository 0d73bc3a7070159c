"""tools/device_check: says so without a device, and its checks hold on the recording device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from device_check_run.rows import Row, merge

ROOT = Path(__file__).resolve().parents[2]


def device_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "tools")))
    command = [sys.executable, "-m", "device_check_run", *arguments]
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize(("kind", "named"), [("auto", "CUDA or NPU"), ("npu", "NPU")])
def test_without_a_device_it_says_so(kind: str, named: str) -> None:
    done = device_check("--device", kind)
    assert done.returncode == 3
    assert f"finds no {named} device on this machine" in done.stderr


def test_on_the_recording_device_everything_is_right(tmp_path: Path) -> None:
    done = device_check("--device", "recording", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    by_check: dict[str, set[str]] = {}
    for row in found["rows"]:
        by_check.setdefault(row["check"], set()).add(row["status"])
    # Of the library one schedule sends another dtype than the model reduces in.
    parity = [row for row in found["rows"] if row["check"] == "parity"]
    rounding = {row["subject"].split(",")[0] for row in parity if row["status"] == "measured"}
    assert rounding == {"low_precision_reduce_scatter"}
    by_check["parity"].discard("measured")
    assert by_check == {
        "parity": {"right"},
        "order": {"right"},
        "overlap": {"measured"},
        "memory": {"right"},
        "host cost": {"measured"},
    }
    assert "bit-equal to stock FSDP2" in done.stdout


def test_what_one_rank_finds_wrong_is_in_the_table() -> None:
    good, bad = Row("parity", "blocking", "right"), Row("parity", "blocking", "wrong", "gradient 0 is off by 1")
    assert merge([[good], [bad]])[0].detail == "rank 1: gradient 0 is off by 1"
    assert merge([[good], [good]]) == [good]
