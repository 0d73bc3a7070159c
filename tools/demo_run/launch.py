"""Start the workers, hear from rank 0, and never leave one behind or wait for one without end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from demo_run.settings import Settings

TOOLS = Path(__file__).resolve().parents[1]
_POLL_S = 0.2


class WorkerError(RuntimeError):
    """The workers did not come to an end by themselves; the message is one line."""


def run_workers(
    settings: Settings, out: Path, on_event: Callable[[dict[str, Any]], None], silence_s: float = 180.0
) -> dict[str, Any]:
    """Run all workers to their end and return what rank 0 wrote.

    Their standard error goes to `out`/rank<r>.log.

    Raises:
        WorkerError: if a worker fails, or rank 0 says nothing for `silence_s`; none is left running.
    """
    settings_path, result_path = out / "settings.json", out / "result.json"
    settings.save(settings_path)
    result_path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        commands = [
            [sys.executable, "-m", "demo_run.worker", str(settings_path), str(rank), str(store), str(result_path)]
            for rank in range(settings.world_size)
        ]
        watch(commands, out, on_event, silence_s)
    result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
    return result


def watch(
    commands: Sequence[Sequence[str]],
    out: Path,
    on_event: Callable[[dict[str, Any]], None],
    silence_s: float,
    interface: str | None = None,
) -> None:
    """Run one process a command until all have ended; see `run_workers`. Gloo uses `interface`, by default the loopback's."""
    environment = _environment(interface)
    with ExitStack() as stack:
        logs = [stack.enter_context((out / f"rank{rank}.log").open("w")) for rank in range(len(commands))]
        workers = stack.enter_context(_children(commands, logs, environment))
        lines: queue.Queue[str] = queue.Queue()
        assert workers[0].stdout is not None
        reader = threading.Thread(target=_pump, args=(workers[0].stdout, lines), daemon=True)
        reader.start()
        heard_s = time.monotonic()
        while any(worker.poll() is None for worker in workers) or reader.is_alive() or not lines.empty():
            for line in _available(lines):
                heard_s = time.monotonic()
                if line.startswith("{"):
                    on_event(json.loads(line))
            _raise_if_dead(workers, out)
            if time.monotonic() - heard_s > silence_s:
                raise WorkerError(f"the workers made no step for {silence_s:.0f} s; see {out / 'rank0.log'}")
        _raise_if_dead(workers, out)


def leave_with_parent() -> None:
    """End this process, a worker, when its standard input closes: the parent is gone, and nobody reads the result."""

    def wait() -> None:
        # Not through sys.stdin: a thread inside its lock when the interpreter ends is a fatal error.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _environment(interface: str | None) -> dict[str, str]:
    environment = dict(os.environ)
    paths = [str(TOOLS), str(TOOLS.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["OMP_NUM_THREADS"] = "1"
    if interface is None and Path("/sys/class/net/lo").exists():
        interface = "lo"
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


@contextmanager
def _children(
    commands: Sequence[Sequence[str]], logs: Sequence[IO[str]], environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes, all over when the context closes. A worker ends by itself when its standard input closes."""
    workers: list[subprocess.Popen[str]] = []
    try:
        for rank, (command, log) in enumerate(zip(commands, logs, strict=True)):
            workers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else log,
                    stderr=log,
                    text=True,
                    env=environment,
                )
            )
        yield workers
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
        for worker in workers:
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                if stream is not None:
                    stream.close()


def _pump(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)


def _available(lines: queue.Queue[str]) -> Iterator[str]:
    """What has been said, waiting a little for the first line."""
    try:
        yield lines.get(timeout=_POLL_S)
        while True:
            yield lines.get_nowait()
    except queue.Empty:
        return


def _raise_if_dead(workers: Sequence[subprocess.Popen[str]], out: Path) -> None:
    if not any(worker.poll() for worker in workers):
        return
    # A death makes the others fail too, a moment later: of those seen dead first, one that was killed is the cause.
    codes = {rank: code for rank, worker in enumerate(workers) if (code := worker.poll())}
    rank = min(codes, key=lambda r: (codes[r] > 0, r))
    log = out / f"rank{rank}.log"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = said[-1].removeprefix(f"[rank{rank}]:").strip() if said else "no output"
    how = f"was killed by signal {-codes[rank]}" if codes[rank] < 0 else f"failed ({last})"
    raise WorkerError(f"worker {rank} {how}; see {log}")
