"""Worlds: real processes joined by gloo that run one case after another, so that a case does not pay for a launch.

`world.run(case, **arguments)` calls the function on every rank and returns what each returned.  A case is a function at
the top of a module, so that it travels by name; it gets a `Rank` first.  A world that lost a process or hangs is thrown away.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.worlds import bound

PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "commplan.fsdp2", __name__]

MAX_THREADS = 72
"""Every process group that gloo made has a thread that wakes a hundred times a second. A world with more is made anew."""

CASE_TIMEOUT_S = float(os.environ.get("WORLD_TIMEOUT_S", "120"))


class CaseError(AssertionError):
    """A case raised on some rank; holds the ranks' tracebacks."""


class WorldDiedError(AssertionError):
    """A process of the world ended or hung in mid-case."""


@dataclass
class Rank:
    """What a case knows of where it runs."""

    rank: int
    size: int
    _meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], DeviceMesh] = field(default_factory=dict)

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
        """The mesh of this shape; made once a world, since making its groups is collective and slow."""
        key = (shape, names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return self._meshes[key]


def _serve(rank: int, size: int, store_path: str, requests: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    # What torch warns of in its own code is not ours to mend.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module=r"torch\b")
    store = dist.FileStore(store_path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=CASE_TIMEOUT_S))
    here = Rank(rank, size)
    bound.watch()
    # What is imported by now stays: a collection that visits it takes longer than a backward.
    gc.collect()
    gc.freeze()
    while (request := requests.recv()) is not None:
        case, arguments = request
        try:
            requests.send((True, case(here, **arguments)))
        except BaseException:  # noqa: BLE001 - it is reported to the test
            requests.send((False, traceback.format_exc()))
    os._exit(0)


class World:
    """`size` processes joined in one default process group."""

    def __init__(self, size: int) -> None:
        # Forked from a process that has torch: a world is there at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        store_path = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store_path, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run `case` on every rank.

        Raises:
            CaseError: it raised somewhere.
            WorldDiedError: a process ended or did not answer; the world is closed.
        """
        for pipe in self._pipes:
            pipe.send((case, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.size:
            open_pipes = {p: r for r, p in enumerate(self._pipes) if r not in answers}
            ready = wait(list(open_pipes), timeout=CASE_TIMEOUT_S)
            if not ready:
                self._dump_stacks()
                self.close()
                raise WorldDiedError(f"{case.__name__}: rank(s) {sorted(open_pipes.values())} did not answer")
            for pipe in ready:
                rank = open_pipes[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.close()
                    raise WorldDiedError(f"{case.__name__}: rank {rank} died") from None
        failed = {rank: text for rank, (is_right, text) in answers.items() if not is_right}
        if failed:
            raise CaseError("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failed.items())))
        return [answers[rank][1] for rank in range(self.size)]

    def run_with_victims(self, case: Callable[..., Any], victims: Sequence[int], **arguments: Any) -> dict[int, Any]:
        """Run a case in which `victims` are killed or stopped; what each of the others returned. Closes the world."""
        for pipe in self._pipes:
            pipe.send((case, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        try:
            for rank in sorted(set(range(self.size)) - set(victims)):
                if not self._pipes[rank].poll(CASE_TIMEOUT_S):
                    self._dump_stacks()
                    raise WorldDiedError(f"{case.__name__}: rank {rank} did not answer")
                try:
                    answers[rank] = self._pipes[rank].recv()
                except EOFError:
                    raise WorldDiedError(f"{case.__name__}: rank {rank}, which is no victim, died") from None
        finally:
            # Not asked to end: a victim may be stopped, and the others' groups are broken.
            for process in self._processes:
                process.kill()
            self.close()
        failed = {rank: text for rank, (is_right, text) in answers.items() if not is_right}
        if failed:
            raise CaseError("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failed.items())))
        return {rank: answer for rank, (_, answer) in answers.items()}

    def _dump_stacks(self) -> None:
        """Let every process print where its threads are: the only trace of a hang."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)

    @property
    def is_alive(self) -> bool:
        """Whether another case can run."""
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    @property
    def is_crowded(self) -> bool:
        """Whether its processes have so many threads that cases take longer for it."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return tasks.exists() and len(list(tasks.iterdir())) > MAX_THREADS

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    process.kill()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._folder.cleanup()


class Worlds:
    """The world of a test session: made when first asked for, and anew for another size, or when it died or is crowded."""

    def __init__(self) -> None:
        self._world: World | None = None

    def of(self, size: int) -> World:
        """A live world of `size` processes."""
        world = self._world
        if world is None or world.size != size or not world.is_alive or world.is_crowded:
            self.close()
            world = self._world = World(size)
        return world

    @contextmanager
    def thrown_away(self, size: int) -> Iterator[World]:
        """A world for a case that may leave processes in no state to go on."""
        world = World(size)
        try:
            yield world
        finally:
            world.close()

    def close(self) -> None:
        """End it."""
        if self._world is not None:
            self._world.close()
            self._world = None
