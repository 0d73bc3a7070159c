"""Processes that run the checks together; one that dies or hangs is told, not waited for."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from device_check_run.platform import Platform, load
from device_check_run.rows import Row, merge


def run(platform: Platform, limit_s: float) -> list[Row]:
    """The rows of all ranks, merged, and one for each rank that did not finish."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        store = str(Path(folder) / "store")
        pipes: list[Connection] = []
        processes = []
        for rank in range(platform.num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(platform, rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        of_ranks, missing = _collect(pipes, time.monotonic() + limit_s)
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
    lost = [Row("processes", f"rank {rank}", "failed", why) for rank, why in missing.items()]
    return [*merge(of_ranks), *lost]


def _collect(pipes: list[Connection], limit_s: float) -> tuple[list[list[Row]], dict[int, str]]:
    of_ranks: list[list[Row]] = [[] for _ in pipes]
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    missing: dict[int, str] = {}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, limit_s - time.monotonic()))
        if not ready:
            missing |= dict.fromkeys(open_pipes.values(), "it did not finish in time")
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                row = pipe.recv()
            except EOFError:
                missing[rank] = "its process ended; see its messages above"
                row = None
            if row is None:
                del open_pipes[pipe]
            else:
                of_ranks[rank].append(row)
    return of_ranks, missing


def serve(platform: Platform, rank: int, store_path: str, answers: Connection) -> None:
    """One rank: every row as soon as it is known, then None."""
    if platform.kind != "recording":
        load(platform.kind)
        torch.get_device_module(platform.kind).set_device(platform.device(rank))
    else:
        torch.set_num_threads(1)
    from device_check_run.checks import TIMEOUT_S, Checks

    store = dist.FileStore(store_path, platform.num_ranks)
    limit = timedelta(seconds=2 * TIMEOUT_S)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=platform.num_ranks, timeout=limit)
    for row in Checks(platform, rank).run():
        answers.send(row)
    answers.send(None)
    answers.close()
    # Groups of a device may take long to end, and there is nothing to save.
    os._exit(0)
