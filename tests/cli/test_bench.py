"""`commplan bench`: what it asks for before anything starts, and whole jobs as a launcher starts them."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from commplan.cli import bench
from tests.cli.running import BAD, Result, Run, write

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
TIMEOUT_S = float(os.environ.get("WORLD_TIMEOUT_S", "120"))


def test_without_a_launcher_it_says_how_to_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = run("bench", "--schedules", "blocking", "--", "train.py")
    assert done.code == 2
    assert bench.HOW_TO_START in done.err


MISUSES = [
    (("--schedules", "bloking"), "did you mean blocking?"),
    (("--schedules", "blocking, blocking"), "'blocking' is named twice"),
    (("--schedules", ","), "name at least one"),
    (("--schedules", "-"), "can't be standard input"),
    (("--schedules", "bad.yaml"), "CP0"),
    (("--schedules", "delayed_allreduce", "--set", "q=2"), "no schedule here has a param 'q'"),
    (("--schedules", "delayed_allreduce", "--set", "k=1000"), "param k: expected"),
    (("--set", "k"), "expected NAME=INTEGER"),
    (("--steps", "0"), "--steps"),
    (("--json", "nowhere/out.json"), "there is no folder"),
    (("--", "trian.py"), "there is no script 'trian.py'; did you mean train.py?"),
    (("--", "-m"), "of which module"),
    (("--replicas", "3"), "4 ranks can't be 3 equal replicas"),
    (("--width", "100"), "a multiple of 64"),
    (("--modules", "3", "train.py"), "there is a script"),
]


@pytest.mark.parametrize(("arguments", "told"), MISUSES, ids=[" ".join(arguments) for arguments, _ in MISUSES])
def test_wrong_usage(run: Run, launched: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str) -> None:
    write("bad.yaml", BAD)
    write("train.py", "raise AssertionError")
    done = run("bench", *arguments)
    assert done.code == 2
    assert told in " ".join(done.err.split())
    launched.setenv("LOCAL_RANK", "1")
    if arguments[0] != "--steps":  # which is the parser's own
        assert run("bench", *arguments) == Result(2, "", "")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def job(num_ranks: int, *arguments: str, cwd: Path, command: str = "bench") -> list[tuple[int, str, str]]:
    """Exit code and output of every rank."""
    port = free_port()
    processes = []
    for rank in range(num_ranks):
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", "commplan", command, *arguments],
            cwd=cwd,
            env={**os.environ, **here, **address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    try:
        found = []
        for process in processes:
            out, err = process.communicate(timeout=TIMEOUT_S)
            found.append((process.returncode, out, err))
        return found
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_the_example_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 40)
    options = ("--schedules", "delayed_allreduce", "--set", "k=2", "--steps", "1", "--json", "out.json")
    ranks = job(4, *options, "--", str(ROOT / "examples" / "train.py"), "text", "1000", cwd=tmp_path)
    for rank, (code, out, err) in enumerate(ranks):
        assert code == 0, err
        assert "Traceback" not in err
        assert ("best:" in out) is (rank == 0)
        assert bool(out) is (rank == 0)
    figures = json.loads((tmp_path / "out.json").read_text())
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == ["stock FSDP2", "delayed_allreduce", "pipelined_allreduce (the script's)"]
    assert rows["delayed_allreduce"]["params"] == {"k": 2}
    for row in rows.values():
        assert len(row["samples"]) == 1
        assert row["ratio_native"] == pytest.approx(rows["stock FSDP2"]["step_s"] / row["step_s"])
        assert row["gradient_difference"] == 0
    table = ranks[0][1]
    for name in rows:
        assert name in table
    last_step = re.findall(r"^step (\d+) loss", table, re.MULTILINE)[-1]
    assert int(last_step) < 20, "the script was not ended"


SCRIPT = """\
import gc, signal, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import beside

if __name__ == "__main__":
    assert sys.argv == [beside.expected, "--its", "-h", "--", "6"], sys.argv
    print("process", gc.get_threshold(), signal.getsignal(signal.SIGPIPE))
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    beside.end()
"""
BESIDE = "expected = {expected!r}\n\n\ndef end():\n    {end}\n"


@pytest.mark.parametrize(
    ("end", "code", "is_module"),
    [("pass", 1, False), ("raise SystemExit(7)", 7, True), ("raise ValueError('mine')", 1, False)],
)
def test_a_script_that_ends_early(tmp_path: Path, end: str, code: int, is_module: bool) -> None:
    """It is run as `python SCRIPT ARGS...` would, from its own folder or as a module from here; its own end decides."""
    folder = tmp_path if is_module else tmp_path / "inner"
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    expected = str(folder / "script.py") if is_module else "inner/script.py"
    (folder / "beside.py").write_text(BESIDE.format(expected=expected, end=end))
    command = ("-m", "script") if is_module else ("inner/script.py",)
    options = ("--schedules", "blocking", "--steps", "9", "--")
    ((found, out, err),) = job(1, *options, *command, "--its", "-h", "--", "6", cwd=tmp_path)
    assert found == code, err
    assert f"process {gc.get_threshold()} {signal.getsignal(signal.SIGPIPE)}" in out
    assert "short of the 9 steps asked for; counted: stock FSDP2 0, blocking 0" in out
    assert ("ValueError: mine" in err) is ("mine" in end)
