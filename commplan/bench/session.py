"""The measurement: what happens at the end of each optimizer step of a script that knows nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Final, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from commplan.bench.figures import STOCK, Result, Row, Sample, worst
from commplan.bench.held import HeldAttachment
from commplan.bench.replay import Gradients, Replay, difference
from commplan.bench.stepping import Stepper, device_of, in_words
from commplan.bench.turns import turns
from commplan.errors import CommplanError, RankMismatchError
from commplan.fsdp2.attachment import Attachment, Options, attach
from commplan.fsdp2.devices import backend_for
from commplan.language import bind_params
from commplan.language.spec import ScheduleSpec

WARM_UP_STEPS: Final = 2
"""Steps after each switch that do not count: plans are compiled for the real order of modules, groups and memory made."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule to measure, under the name by which it was asked for."""

    name: str
    spec: ScheduleSpec
    params: Mapping[str, int] = field(default_factory=dict)
    options: Options = field(default_factory=Options)

    def attach(self, model: nn.Module) -> Attachment:
        """As `commplan.attach`."""
        return attach(model, self.spec, options=self.options, rank_checks=None, **self.params)


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        num_steps: counted steps of stock FSDP2 and of each schedule.
        block: counted steps between two switches.
        checks_gradients: compare the gradients of one step under each schedule with stock FSDP2's.
    """

    candidates: tuple[Candidate, ...]
    num_steps: int = 50
    block: int = 10
    checks_gradients: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a script under measurement.

    Attributes:
        result: None where no model was found, or no rank got as far as to compare schedules.
        error: what ended the script, unless it was the measurement, or the script's own end.
        problem: why there is no result, where the script is not to blame.
    """

    result: Result | None
    error: BaseException | None = None
    problem: str = ""


class Listener(Protocol):
    """Who is told."""

    def progress(self, line: str) -> None:
        """What goes on."""

    def outcome(self, outcome: Outcome) -> None:
        """What came of it, once: as soon as that is known, the script and its process group may still have to end."""


def run(settings: Settings, work: Callable[[], object], listener: Listener) -> bool:
    """Run a training script, `work`, until every schedule is measured, on every rank alike.

    Returns:
        Whether it was ended for that; then it may have left process groups behind.
    """
    return _Session(settings, listener).stepper.run(work)


class _Session:
    """One measurement of one process; every rank has one, and all do the same at the same step."""

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self.stepper = Stepper(self._measure, self._end)
        self._settings = settings
        self._listener = listener
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._about: dict[str, Any] = {}

    @property
    def _held(self) -> list[HeldAttachment]:
        return self.stepper.held

    def _end(self, error: BaseException | None) -> None:
        """The script has ended, or is about to: tell what was measured."""
        result = Result(tuple(self._rows), notes=tuple(self._notes), **self._about) if self._rows else None
        problem = self.stepper.problem("before schedules were compared")
        self._listener.outcome(Outcome(result, error, "" if result else problem))

    # The measurement: each `yield` is one step of the script.

    def _measure(self, model: nn.Module) -> Generator[None, None, None]:
        device = device_of(model)
        self._about = {
            "model": in_words(model),
            "device": device.type,
            "backend": backend_for(cast(Any, dist.group.WORLD), device),
            "world_size": dist.get_world_size(),
            "torch_release": torch.__version__,
            "num_steps": self._settings.num_steps,
        }
        with self.stepper.others_attached(model) as notes:
            self._notes += notes
            yield from self._compare(model, device)

    def _compare(self, model: nn.Module, device: torch.device) -> Generator[None, None, None]:
        candidates = self._candidates()
        with Replay(model, device) as replay:
            yield
            self._listener.progress(f"{self._about['model']}; attaching {', '.join(c.name for c in candidates)}")
            rows = self._tried(model, candidates, replay)
        running = [i for i, row in enumerate(rows) if not row.refusal]
        self._rows = rows
        if len(running) == 1:
            return
        blocks = list(turns(len(running), self._settings.num_steps, self._settings.block))
        num_steps = sum(WARM_UP_STEPS + turn.num_steps for turn in blocks)
        self._listener.progress(f"{num_steps} steps to go")
        for number, turn in enumerate(blocks, start=1):
            place = running[turn.row]
            candidate = candidates[place - 1] if place else None
            with self._shown(model, candidate) as attachment:
                samples = yield from _counted(turn.num_steps, device, attachment)
            # They count when every rank has them.
            worsts = [worst(of_step) for of_step in zip(*_gathered(samples), strict=True)]
            self._rows[place] = replace(self._rows[place], samples=(*self._rows[place].samples, *worsts))
            if number % len(running) == 0:
                medians = (f"{row.shown_name} {1e3 * row.step_s:.1f} ms" for row in self._rows if row.step_s is not None)
                self._listener.progress(f"round {turn.round + 1} of {turn.num_rounds}: {', '.join(medians)}")

    def _candidates(self) -> list[Candidate]:
        """Those that were asked for, and the script's own."""
        found = list(self._settings.candidates)
        for held in self._held:
            if not any(_is_same(known, held) for known in found):
                found.append(Candidate(f"{held.spec.name} (the script's)", held.spec, held.params, held.options))
            self._notes.append(f"the script attaches {held.spec.name} itself: here that only adds it to the table")
        theirs = _gathered([(c.name, c.spec.text, dict(c.params)) for c in found])
        if any(other != theirs[0] for other in theirs):
            raise RankMismatchError("ranks measure different schedules: start `commplan bench` alike on all, from equal files")
        return found

    def _tried(self, model: nn.Module, candidates: Sequence[Candidate], replay: Replay) -> list[Row]:
        """Stock FSDP2 and every schedule, with why it is refused, or whether its gradients are stock FSDP2's."""
        reference = replay.gradients() if self._settings.checks_gradients else None
        if self._settings.checks_gradients and reference is None:
            self._notes.append("gradients were not compared: no training forward of the model itself has an output with one")
        rows = [Row(STOCK, gradient_difference=_difference(reference, replay))]
        for candidate in candidates:
            row = Row(candidate.name, bind_params(candidate.spec, candidate.params))
            attachment, refusal = _attached_everywhere(model, candidate)
            if attachment is None:
                rows.append(replace(row, refusal=refusal))
                continue
            with attachment:
                rows.append(replace(row, gradient_difference=_difference(reference, replay)))
        return rows

    @contextmanager
    def _shown(self, model: nn.Module, candidate: Candidate | None) -> Iterator[Attachment | None]:
        """Inside, the schedule is attached, and what the script holds shows it."""
        if candidate is None:
            yield None
            return
        with candidate.attach(model) as attachment, self.stepper.showing(attachment):
            yield attachment


class _DeviceMemory:
    """Most memory alive at once since this was made, where the device's module in torch counts it."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device) if device.type != "cpu" else None
        if self._module is not None:
            self._module.synchronize()
            self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        return None if self._module is None else self._module.max_memory_allocated()


def _counted(num_steps: int, device: torch.device, attachment: Attachment | None) -> Generator[None, None, list[Sample]]:
    """This rank's figures of the steps after a warm-up; without an attachment those of stock FSDP2."""
    yield from repeat(None, WARM_UP_STEPS)
    memory = _DeviceMemory(device)
    samples = []
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        yield
        if device.type != "cpu":
            torch.accelerator.synchronize()
        step_s = time.perf_counter() - begin_s
        samples.append(_sample(step_s, {} if attachment is None else attachment.stats(), memory.peak_bytes()))
    return samples


def _sample(step_s: float, stats: Mapping[str, float], device_bytes: int | None) -> Sample:
    if not stats:
        return Sample(step_s, device_bytes=device_bytes)
    return Sample(
        step_s,
        stats["commplan/backward_s"],
        stats["commplan/exposed_s"],
        int(stats["commplan/peak_bytes"]),
        device_bytes,
    )


def _attached_everywhere(model: nn.Module, candidate: Candidate) -> tuple[Attachment | None, str]:
    """The attachment, if every rank has one; else why not: the reason of the first that has one of its own."""
    attachment: Attachment | None = None
    refusal: tuple[bool, str] | None = None
    try:
        attachment = candidate.attach(model)
    except CommplanError as error:
        refusal = isinstance(error, RankMismatchError), str(error)
    refusals = sorted(found for found in _gathered(refusal) if found is not None)
    if refusals and attachment is not None:
        attachment.detach()
        attachment = None
    return attachment, refusals[0][1] if refusals else ""


def _difference(reference: Gradients | None, replay: Replay) -> float | None:
    """How far the gradients are now from `reference`, relative to its largest entry on any rank."""
    now = None if reference is None else replay.gradients()
    if reference is None or now is None:
        return None
    of_ranks = _gathered(difference(now, reference))
    apart, largest = (max(figures) for figures in zip(*of_ranks, strict=True))
    return apart / largest if apart and largest else apart


def _gathered(value: T) -> list[T]:
    """The value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _is_same(candidate: Candidate, held: HeldAttachment) -> bool:
    """Whether the script attaches a schedule that is measured anyway."""
    return (candidate.spec.text, candidate.options.rank_checks) == (held.spec.text, held.options.rank_checks) and bind_params(
        candidate.spec, candidate.params
    ) == bind_params(held.spec, held.params)
