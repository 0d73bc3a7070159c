"""The training script that users start from runs as it stands, under torchrun."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPT = REPOSITORY / "examples" / "train.py"


def test_short_and_one_line_away_from_plain_fsdp2() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    used = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and node.id == "commplan"]
    assert len(used) == 1


def test_runs_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 127)) * 40)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *(str(SCRIPT), str(text), "6"),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "Warning" not in done.stderr
