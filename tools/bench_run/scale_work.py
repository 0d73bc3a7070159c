"""One point of `tools/bench scale`. For a process of its own."""

from __future__ import annotations

import gc
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import nn

import commplan
from bench_run import fake_ranks
from bench_run.scale import mesh_shape

WARM_UPS: Final = 2
ATTACHES: Final = 3
TIMEOUT_S: Final = 120.0

T = TypeVar("T")


def measure(schedule: str, num_modules: int, num_ranks: int, runs: int) -> dict[str, Any]:
    """See `bench_run.scale.FIGURES`; bytes are those that Python allocates, unless they are resident memory."""
    options = commplan.Options(timeout_s=TIMEOUT_S)
    with fake_ranks.fake_world(num_ranks) as store:
        mesh = fake_ranks.mesh_of(*mesh_shape(num_ranks))
        # What the first attachment of a process pays, whatever its model: imports, and reading torch's source.
        small = fake_ranks.make_model(2, mesh)
        with commplan.attach(small, schedule, options=options):
            _backward_s(small, 1)
        model = fake_ranks.make_model(num_modules, mesh)
        native_s = _backward_s(model, runs)
        table = commplan.describe(model)
        describe_s = statistics.median(_timed(lambda: commplan.describe(model))[1] for _ in range(runs))
        compile_s = statistics.median(_timed(lambda: commplan.compile(schedule, table))[1] for _ in range(runs))

        gc.collect()
        resident_bytes, requests = _resident_bytes(), store.requests
        attachment, first_s = _timed(lambda: commplan.attach(model, schedule, options=options))
        asked = store.requests - requests
        backward_s = _backward_s(model, runs)
        gc.collect()
        grown_bytes = _resident_bytes() - resident_bytes
        attachment.detach()
        attach_s = [first_s]
        while len(attach_s) < ATTACHES:
            attachment, taken_s = _timed(lambda: commplan.attach(model, schedule, options=options))
            attachment.detach()
            attach_s.append(taken_s)

        plan, plan_bytes = _allocated(lambda: commplan.compile(schedule, table))
        attachment, attachment_bytes = _allocated(lambda: commplan.attach(model, schedule, options=options))
        attachment.detach()
        assert attachment.plan == plan
    return {
        "modules": num_modules,
        "ranks": num_ranks,
        "mesh": mesh_shape(num_ranks),
        "compile_s": compile_s,
        "describe_s": describe_s,
        "attach_s": statistics.median(attach_s),
        "backward_s": backward_s,
        "native_s": native_s,
        "plan_bytes": plan_bytes,
        "attachment_bytes": attachment_bytes,
        "rss_bytes": grown_bytes,
        "num_requests": asked.number - asked.notes_read,
        "num_requests_last": asked.number,
        "moved_bytes": asked.moved_bytes,
    }


def _backward_s(model: nn.Module, runs: int) -> float:
    """Median of the host's time."""
    times_s = []
    for turn in range(-WARM_UPS, runs):
        loss = fake_ranks.loss_of(model)
        _, taken_s = _timed(loss.backward)
        model.zero_grad()
        if turn >= 0:
            times_s.append(taken_s)
    return statistics.median(times_s)


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    begin_s = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin_s


def _allocated(make: Callable[[], T]) -> tuple[T, int]:
    """What `make` returns, and the bytes that Python holds for it."""
    gc.collect()
    tracemalloc.start()
    try:
        made = make()
        gc.collect()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
