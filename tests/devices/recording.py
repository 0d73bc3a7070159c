"""Training on the recording device: CPU tensors, lanes of fake streams, a log of all that happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from commplan.execute.memory import Memory
from commplan.execute.trace_log import Did, RecordedLanes, TracedModule, TraceLog
from commplan.fsdp2 import Options
from commplan.fsdp2.torch_operators import AccessMode
from tests.devices.fake import Collectives, FakeModule, Pace
from tests.worlds.lazy import PoisonedMemory

CPU = torch.device("cpu")


class Device:
    """A recording device; `options` make an attachment use it."""

    def __init__(self, pace: Pace, seed: int = 0, traced: type[TracedModule] = TracedModule) -> None:
        self.log = TraceLog()
        self.fake = FakeModule(pace, seed)
        self.module = traced(self.fake, CPU, self.log)
        self.pace = pace
        self.lanes: list[RecordedLanes] = []

    def make_lanes(self, device: torch.device, timeout_s: float) -> RecordedLanes:
        # What runs at once needs no place of its own to run in, and shows that a real device would log alike.
        watch = AccessMode if self.pace is Pace.EAGER else partial(AccessMode, run=self.fake.run)
        self.lanes.append(RecordedLanes(self.module, timeout_s, watch))
        return self.lanes[-1]

    @property
    def options(self) -> Options:
        make_memory = Memory if self.pace is Pace.EAGER else PoisonedMemory
        return Options(timeout_s=60, rank_checks="off", make_lanes=self.make_lanes, make_memory=make_memory)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, collectives of lanes run when their streams get to them."""
        with ExitStack() as stack:
            if self.pace is not Pace.EAGER:
                instead = Collectives(self.fake, self.log, lambda stream: self.module._traced(stream, "stream").name)
                for name, collective in instead.by_name.items():
                    stack.enter_context(patch.object(dist, name, collective))
            yield

    def read(self, model: torch.nn.Module) -> dict[str, Any]:
        """This rank's gradients, read as a user would, on the stream that is current."""
        with self.lanes[-1].watching():
            found = {
                name: None if p.grad is None else p.grad.to_local().clone()  # type: ignore[attr-defined]
                for name, p in model.named_parameters()
            }
        self.log.add(Did.LEAVE, self.module.current_stream(CPU).name)
        return found
