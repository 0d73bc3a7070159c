"""What a profiler shows, and what the log says."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import pytest
import torch

import commplan
from commplan.execute.ranges import WAIT
from commplan.fsdp2 import torch_private as private
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

NUM_BLOCKS = 3

lanes_in_profiles = pytest.mark.skipif(
    "profile_all_threads" not in str(torch._C._profiler._ExperimentalConfig.__init__.__doc__),
    reason="the profiler of this torch sees only threads that it began on",
)


def profile_of_all_threads() -> torch.profiler.profile:
    """A profile that has threads which began before it, as lanes do."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config)


def profiled(here: Rank, schedule: str) -> dict[str, list[int]]:
    """Range -> the threads in which it lay."""
    model = models.shard(models.fk(NUM_BLOCKS), here.mesh((2, 2)))
    with commplan.attach(model, schedule):
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        with profile_of_all_threads() as profiler:
            model(torch.zeros(1, requires_grad=True)).sum().backward()
    threads: dict[str, list[int]] = defaultdict(list)
    for event in profiler.events():
        if event.name.startswith("commplan::"):
            threads[event.name].append(event.thread)
    return dict(threads)


@lanes_in_profiles
def test_each_op_has_a_range_on_the_thread_of_its_lane(worlds: Worlds) -> None:
    for threads in worlds.of(4).run(profiled, schedule="pipelined_allreduce"):
        ops = {name: of for name, of in threads.items() if name != WAIT}
        modules = [str(NUM_BLOCKS - 1 - n) for n in range(NUM_BLOCKS)]
        expected = [f"commplan::{kind}_{n} ({modules[n]})" for kind in ("RS", "AR", "apply") for n in range(NUM_BLOCKS)]
        assert set(ops) == set(expected)
        assert all(len(of) == 1 for of in ops.values())
        on_lane = {kind: {of[0] for name, of in ops.items() if f"::{kind}_" in name} for kind in ("RS", "AR", "apply")}
        assert [len(on_lane[kind]) for kind in ("RS", "AR")] == [1, 1]
        (compute,) = set(threads[WAIT])
        assert on_lane["apply"] == {compute}
        assert len({compute} | on_lane["RS"] | on_lane["AR"]) == 3


def test_no_range_is_made_where_no_profiler_is_active() -> None:
    with private.profiler_range("commplan::AR_0 (x)") as entered:
        assert entered is None
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        private.profiler_range("commplan::x"),
    ):
        pass
    assert [event.name for event in profiler.events() if event.name.startswith("commplan")] == ["commplan::x"]


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.levelname, record.getMessage()))


def logged(here: Rank) -> list[tuple[str, str]]:
    logger, kept = logging.getLogger("commplan"), Kept()
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        model: Any = models.shard(models.Net((2, 0, 1)), here.mesh((2, 2)))
        with commplan.attach(model, "delayed_allreduce", k=2) as attachment:
            kept.said.append(("digest", attachment.plan.digest[:12]))
            model(torch.ones(1, 4)).sum().backward()
            kept.said.append(("digest", attachment.plan.digest[:12]))
    finally:
        logger.removeHandler(kept)
        logger.setLevel(logging.NOTSET)
    return kept.said


def test_the_log_tells_what_was_attached_and_what_was_compiled_anew(worlds: Worlds) -> None:
    for said in worlds.of(4).run(logged):
        first, second = (digest for level, digest in said if level == "digest")
        infos = [text for level, text in said if level == "INFO"]
        attached = next(text for text in infos if text.startswith("attached "))
        assert f"attached delayed_allreduce k=2, plan {first}: 4 modules, lanes " in attached
        anew = next(text for text in infos if text.startswith("modules run in another order"))
        assert f"plan {second}" in anew
        assert first != second


def test_the_library_adds_no_handler_that_prints() -> None:
    handlers = logging.getLogger("commplan").handlers
    assert handlers
    assert all(isinstance(handler, logging.NullHandler) for handler in handlers)
