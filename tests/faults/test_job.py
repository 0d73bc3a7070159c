"""A job as a launcher starts it, with a TCP store: processes that lost a peer really end, and say why; others end in peace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZE = 4
PATIENCE_S = float(os.environ.get("WORLD_TIMEOUT_S", "120"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_job(victim: int, how: str) -> dict[int, tuple[int, str]]:
    """Exit code and output of every rank but the victim. No rank may outlive the patience."""
    port = str(free_port())
    processes = {}
    for rank in range(SIZE):
        here = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        case = {"VICTIM": str(victim), "HOW": how, "LOSE_AT": "2", "TIMEOUT_S": "8", "LINGER_S": "0", "AWAY_S": "600"}
        case |= CASES.get(how, {})
        processes[rank] = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.job"],
            cwd=ROOT,
            env={**os.environ, **here, **case, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        found = {}
        for rank, process in processes.items():
            if rank != victim:
                output, _ = process.communicate(timeout=max(1.0, deadline_s - time.monotonic()))
                found[rank] = process.returncode, output
        return found
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


JOBS = [(0, "kill"), (0, "stop"), (3, "kill"), (3, "stop"), (3, "sleep"), (3, "leave"), (3, "late"), (-1, "")]
"""Who is lost in each, and how; in the last nobody."""

CASES = {"leave": {"LINGER_S": "9"}, "late": {"HOW": "leave", "TIMEOUT_S": "60", "LINGER_S": "12", "AWAY_S": "6"}}
"""In which the others leave: the victim does not come, or comes long before the collectives have to be over."""

AT_ONCE = 2


@pytest.fixture(scope="module")
def ended() -> dict[tuple[int, str], dict[int, tuple[int, str]]]:
    """What became of each job; some run beside each other, since most of their time they wait."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(JOBS, pool.map(lambda job: run_job(*job), JOBS), strict=True))


@pytest.mark.parametrize(("victim", "how"), JOBS[:-3])
def test_every_process_ends_with_a_named_error(
    ended: dict[tuple[int, str], dict[int, tuple[int, str]]], victim: int, how: str
) -> None:
    """Rank 0 holds the store: with it, notes are gone, but not the errors."""
    for rank, (code, output) in ended[victim, how].items():
        assert code == 1, (rank, code, output)
        assert "commplan.errors." in output, output
        assert "of module '" in output or "rank check" in output, output
        if victim != 0:
            assert "Ranks: " in output, output


@pytest.mark.parametrize("how", CASES)
def test_who_drops_a_model_while_collectives_wait_ends_in_peace(
    ended: dict[tuple[int, str], dict[int, tuple[int, str]]], how: str
) -> None:
    """Python would abort the process for a thread that is in torch still."""
    for rank, (code, output) in ended[3, how].items():
        # Rank 0 takes the store with it, of which torch may warn.
        assert code == 0, (rank, code, output)
        assert output.startswith("left"), output


def test_a_job_without_a_fault_ends_in_peace(ended: dict[tuple[int, str], dict[int, tuple[int, str]]]) -> None:
    for rank, (code, output) in ended[-1, ""].items():
        assert (code, output.strip()) == (0, "trained"), rank
