"""Backwards of `tools/bench host`, on a fake process group."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import commplan
from bench_run import fake_ranks
from bench_run.host import MESH, PREFETCH_SCHEDULE, Setting, Times
from commplan.errors import CommplanError
from commplan.language import library

WARM_UPS: Final = 2
TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Variant:
    """One way to train; without a schedule FSDP2 alone, and without shards not even that."""

    is_sharded: bool = True
    schedule: str | None = None
    options: commplan.Options | None = None


def variants(schedule: str) -> dict[str, Variant]:
    """By the name of their figures, see `bench_run.host.TOLD`."""
    workers = commplan.Options(timeout_s=TIMEOUT_S)
    streams = commplan.Options(timeout_s=TIMEOUT_S, make_lanes=fake_ranks.free_streams)
    return {
        "plain": Variant(is_sharded=False),
        "native": Variant(),
        "commplan": Variant(schedule=schedule, options=workers),
        "commplan_prefetch": Variant(schedule=PREFETCH_SCHEDULE, options=workers),
        "commplan_streams": Variant(schedule=schedule, options=streams),
        "commplan_prefetch_streams": Variant(schedule=PREFETCH_SCHEDULE, options=streams),
    }


def take_turns(setting: Setting) -> tuple[dict[tuple[int, str], Times], dict[str, Times], dict[str, str]]:
    """Backwards of all variants in turn, for one number of modules after another.

    Returns:
        Times by number of modules and name; of the number that counts, times on one core by name, nothing where threads can't
        be kept to a core; and the schedules that could not be attached, with the reasons.
    """
    times: dict[tuple[int, str], Times] = {}
    on_one_core: dict[str, Times] = {}
    left_out: dict[str, str] = {}
    with fake_ranks.fake_world(math.prod(MESH)):
        mesh = fake_ranks.mesh_of(*MESH)
        for count in setting.counts:
            # What is there takes the caches of what runs, so a model shares the process with those that it is compared with.
            with contextlib.ExitStack() as attachments:
                models = {
                    name: model
                    for name, variant in variants(setting.schedule).items()
                    if (model := ready(variant, count, mesh, attachments, left_out)) is not None
                }
                with _settled_memory():
                    times |= {(count, name): found for name, found in _times(models, setting.runs).items()}
                    if count == setting.modules and sys.platform == "linux":
                        with one_core():
                            on_one_core = _times(models, setting.runs)
    return times, on_one_core, left_out


def ready(
    variant: Variant, count: int, mesh: DeviceMesh, attachments: contextlib.ExitStack, left_out: dict[str, str]
) -> nn.Module | None:
    """A model to train, which `attachments` detaches; None, and the reason in `left_out`, if its schedule can't be attached."""
    schedule = variant.schedule
    if schedule in left_out:
        return None
    if schedule is not None and schedule not in library.names():
        left_out[schedule] = "not in the library"
        return None
    model = fake_ranks.make_model(count, mesh if variant.is_sharded else None)
    if schedule is not None:
        try:
            attachments.enter_context(commplan.attach(model, schedule, options=variant.options))
        except CommplanError as error:
            left_out[schedule] = str(error)
            return None
    return model


@contextlib.contextmanager
def _settled_memory() -> Iterator[None]:
    """Inside, Python's collector leaves alone what is there already: no model pays for the others."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Inside, all threads of this process share one core: none is woken on another one."""
    cores = os.sched_getaffinity(0)
    before: dict[int, Collection[int]] = {}
    # Threads may be born meanwhile.
    while new := _threads().difference(before):
        for thread in new:
            before[thread] = cores
            # Or have ended.
            with contextlib.suppress(ProcessLookupError):
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {min(cores)})
    try:
        yield
    finally:
        for thread in _threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, cores))


def _threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def _times(models: Mapping[str, nn.Module], runs: int) -> dict[str, Times]:
    times = {name: Times([], []) for name in models}
    there = list(models.items())
    for turn in range(-WARM_UPS, runs):
        # To and fro, so that none always comes behind the same other one.
        for name, model in there if turn % 2 else reversed(there):
            loss = fake_ranks.loss_of(model)
            began_thread_s, began_s = time.thread_time(), time.perf_counter()
            loss.backward()
            taken_s, busy_s = time.perf_counter() - began_s, time.thread_time() - began_thread_s
            model.zero_grad()
            if turn >= 0:
                times[name].wall_s.append(taken_s)
                times[name].thread_s.append(busy_s)
    return times
