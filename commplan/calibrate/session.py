"""The measurement of a training job: what happens at its optimizer steps, on every rank alike, until a profile is whole."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from commplan.bench.stepping import Measurement, Stepper, device_of, in_words
from commplan.calibrate import origin
from commplan.calibrate.collectives import collectives
from commplan.calibrate.copying import copies_of, memory_bytes_per_s
from commplan.calibrate.figures import Backward, Beside, Measurements, checks, profile_of
from commplan.calibrate.marks import BackwardTimes, Copy, Watch, clock_of
from commplan.calibrate.meeting import Meeting
from commplan.calibrate.statistics import Spread, slowest_group
from commplan.calibrate.sweep import Limits, Sweep, Swept, failing
from commplan.errors import CommplanError
from commplan.execute.agreement import agree
from commplan.execute.board import Board
from commplan.fsdp2 import torch_faults as faults
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.attachment import Attachment, Options, attach
from commplan.fsdp2.devices import lanes_for
from commplan.fsdp2.unit import FsdpUnit
from commplan.language.modules import Module, ModuleTable
from commplan.language.profile_text import profile_text
from commplan.ops import COMPUTE_LANE, Axis
from commplan.plan.model import OpStep, Plan
from commplan.sight.report import BackwardReport, fsdp2_gather

WARM_UP_STEPS: Final = 2
"""Steps after each attachment that do not count."""

ON_CPU: Final = "blocking"
"""FSDP2 gathers parameters itself and holds compute for them; nothing runs beside compute."""

ON_DEVICE: Final = """\
version: 1
name: quiet
summary: Nothing runs beside compute; FSDP2 would gather parameters there.
pre_backward:
  - AG_n
  - wait: AG_n
post_backward:
  - RS_n: {after: compute_n}
  - wait: RS_n
  - AR_n: {after: RS_n}
  - apply_n: {after: AR_n}
"""

BESIDE: Final = "prefetch_overlap"
"""Everything runs beside compute."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        num_steps: counted steps without communication beside compute, and with.
        command: in words, for the profile.
    """

    num_steps: int = 10
    limits: Limits = field(default_factory=Limits)
    command: str = "commplan profile"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What came of it.

    Attributes:
        profile: YAML with comments.
        table: the module table, of the orders in which modules really run.
        summary: a few lines.
    """

    profile: str
    table: ModuleTable
    summary: Sequence[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a script under measurement.

    Attributes:
        calibrated: None where it did not come to an end, and on all ranks but the first of the model's.
        error: what ended the script, unless it was the measurement, or the script's own end.
        problem: why nothing was measured, where the script is not to blame.
    """

    calibrated: Calibrated | None
    error: BaseException | None = None
    problem: str = ""


class Listener(Protocol):
    """Who is told."""

    def progress(self, line: str) -> None:
        """What goes on."""

    def outcome(self, outcome: Outcome) -> None:
        """What came of it, once."""


def run(settings: Settings, work: Callable[[], object], listener: Listener) -> bool:
    """Run a training script, `work`, until its profile is measured, on every rank alike.

    Gradients are right at every step, whatever is attached.

    Returns:
        Whether it was ended for that; then it may have left process groups behind.
    """
    return _Session(settings, listener).stepper.run(work)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of one rank: its backwards, and the report on the last of them that reduced anything."""

    backwards: Sequence[BackwardTimes]
    report: BackwardReport


class _Session:
    """One measurement of one process."""

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self.stepper = Stepper(self._measure, self._end)
        self._settings = settings
        self._listener = listener
        self._calibrated: Calibrated | None = None
        self._is_whole = False
        self._notes: list[str] = []
        self._options = Options(timeout_s=settings.limits.timeout_s)

    def _end(self, error: BaseException | None) -> None:
        problem = "" if self._is_whole else self.stepper.problem("before everything was measured")
        self._listener.outcome(Outcome(self._calibrated, error, problem))

    def _measure(self, model: nn.Module) -> Measurement:
        with self.stepper.others_attached(model) as notes:
            self._notes += notes
            yield
            self._calibrated = yield from self._calibrate(model, device_of(model))
            self._is_whole = True

    def _calibrate(self, model: nn.Module, device: torch.device) -> Generator[None, None, Calibrated | None]:
        begun_s, swept = time.perf_counter(), Swept()
        quiet_schedule = self._quiet_schedule(model, device)
        with self._attached(model, quiet_schedule) as attachment:
            meeting = self._meeting(attachment)
            self._listener.progress(f"{in_words(model)}; compute alone: {WARM_UP_STEPS + self._settings.num_steps} steps")
            quiet = yield from self._steps(model, attachment, device)
            self._listener.progress("collectives alone")
            with failing(meeting):
                self._sweep(attachment, device, meeting, swept)
            compute = self._compute(quiet, [module.name for module in attachment.plan.modules.modules], meeting)
            backwards = [self._backward(quiet, attachment.plan, meeting)]
            gathers = self._gathers(quiet, attachment, meeting) if device.type == "cpu" else {}
            copied_bytes, copied_s = self._copied(quiet, attachment, meeting) if gathers else (0, 0.0)
            # Whose orders are those in which modules ran.
            plan = attachment.plan
        beside = None
        if found := (yield from self._beside(model, device, meeting, backwards, _total_s(quiet))):
            beside, plan = found
        on_cpu = device.type == "cpu"
        memory_speed = self._memory_speed(plan.modules, meeting) if on_cpu and beside is not None else None
        if not meeting.is_first:
            return None
        table = plan.modules
        packed, unpacked = copies_of(plan, packs_lone=not on_cpu)
        measured = Measurements(
            table=table,
            compute=compute,
            gathers=gathers,
            swept=swept,
            beside=beside,
            packed_bytes=packed,
            unpacked_bytes=unpacked,
            device=device.type,
            name=in_words(model),
            source=origin.source(self._settings.command, self._settings.num_steps, model, device),
            notes=[*self._notes, *swept.notes],
            backwards=backwards,
            fsdp2_copied_bytes=copied_bytes,
            fsdp2_copied_s=copied_s,
            memory_bytes_per_s=memory_speed,
        )
        profile, comments = profile_of(measured)
        summary = origin.summary(measured, time.perf_counter() - begun_s)
        return Calibrated(profile_text(profile, comments), table, [*summary, *checks(backwards, profile)])

    def _quiet_schedule(self, model: nn.Module, device: torch.device) -> str:
        if device.type == "cpu":
            return ON_CPU
        try:
            with attach(model, ON_DEVICE, options=self._options):
                return ON_DEVICE
        except CommplanError as error:
            self._notes.append(f"parameters are gathered beside compute, which may slow it: {error}")
            return ON_CPU

    @contextmanager
    def _attached(self, model: nn.Module, schedule: str) -> Generator[Attachment]:
        with attach(model, schedule, options=self._options) as attachment, self.stepper.showing(attachment):
            yield attachment

    def _steps(self, model: nn.Module, attachment: Attachment, device: torch.device) -> Generator[None, None, list[_Step]]:
        """Counted steps under what is attached."""
        names = {module.name for module in attachment.plan.modules.modules}
        with Watch(model, attachment.units, names, clock_of(device)) as watch:
            yield from repeat(None, WARM_UP_STEPS)
            watch.take()
            steps = []
            for _ in range(self._settings.num_steps):
                yield
                if (report := attachment.last_backward) is not None and (backwards := watch.take()):
                    steps.append(_Step(backwards, report))
            if not steps:
                raise CommplanError(
                    f"in {self._settings.num_steps} steps no backward reduced anything: with gradients accumulated over more "
                    "backwards than an optimizer step takes, there is nothing to measure"
                )
            return steps

    def _meeting(self, attachment: Attachment) -> Meeting:
        meshes = {private.mesh(unit.raw) for unit in attachment.units}
        ranks = sorted({rank for mesh in meshes for rank in private.mesh_ranks(mesh).ranks})
        limits = self._settings.limits
        record = {
            "how to measure (the options of `commplan profile`)": f"{self._settings.num_steps} steps, {limits.budget_s} s"
        }
        name = agree(private.default_store(), ranks, dist.get_rank(), record, limits.timeout_s)
        board = Board(lambda: faults.own_store(private.default_store()), name, dist.get_rank(), ranks)
        return Meeting(board, limits.timeout_s)

    def _sweep(self, attachment: Attachment, device: torch.device, meeting: Meeting, swept: Swept) -> None:
        """Between two steps, when the attached schedule is idle, on its process groups."""
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found = collectives(_trained(attachment), swept.notes)
        lanes = lanes_for(device, self._settings.limits.timeout_s)
        try:
            Sweep(found, lanes, meeting, self._settings.limits).run(swept)
            if device.type != "cpu":
                torch.accelerator.synchronize()
        finally:
            lanes.close()

    def _compute(self, steps: Sequence[_Step], names: Sequence[str], meeting: Meeting) -> dict[str, Spread]:
        """Of each module of the plan alone, on the rank that is slowest in it each time; 0 where none computed it."""
        own = {name: [step.backwards[-1].compute_s.get(name, 0.0) for step in steps] for name in names}
        merged = meeting.conclude(
            own,
            lambda ranks: {
                name: _plain(Spread.of([max(at_once) for at_once in zip(*(of_rank[name] for of_rank in ranks), strict=True)]))
                for name in ranks[0]
            },
            "compute of modules",
        )
        return {name: Spread(*figures) for name, figures in merged.items()}

    def _backward(self, steps: Sequence[_Step], plan: Plan, meeting: Meeting) -> Backward:
        """A whole backward; only the first rank's is that of all."""
        own = _plain(Spread.of([step.report.duration_s for step in steps]))
        merged = meeting.conclude(
            own, lambda ranks: _plain(Spread.middle([Spread(*of_rank) for of_rank in ranks])), "backwards of ranks"
        )
        return Backward(plan, Spread(*merged))

    def _gathers(self, steps: Sequence[_Step], attachment: Attachment, meeting: Meeting) -> dict[str, Spread]:
        """How long compute waited for FSDP2's all-gathers, of the modules whose parameters are not whole anyway."""
        gathered = {
            module.name: str(dist.get_process_group_ranks(cast(Any, unit.group(Axis.SHARD))))
            for unit, module in _trained(attachment)
            if _is_gathered(module)
        }
        waited = [_waited_s(step) for step in steps]
        own = {name: [group, [of_step.get(name, 0.0) for of_step in waited]] for name, group in gathered.items()}
        merged = meeting.conclude(
            own,
            lambda ranks: {name: _plain(slowest_group(of_rank[name] for of_rank in ranks)) for name in ranks[0]},
            "all-gathers of FSDP2's own",
        )
        return {name: Spread(*figures) for name, figures in merged.items()}

    def _copied(self, steps: Sequence[_Step], attachment: Attachment, meeting: Meeting) -> tuple[int, float]:
        """How many bytes FSDP2 gathers in a backward, and how long that takes beside waiting, on the middle rank."""
        size_bytes = {module.name: module.gathered_bytes for _, module in _trained(attachment) if _is_gathered(module)}
        copied_bytes, copied_s = [], []
        for step in steps:
            held = {name: seconds for name, seconds in step.backwards[-1].gathers_s.items() if name in size_bytes}
            waited = _waited_s(step)
            copied_bytes.append(sum(size_bytes[name] for name in held))
            copied_s.append(sum(max(seconds - waited[name], 0.0) for name, seconds in held.items()))
        own = [statistics.median(copied_bytes), statistics.median(copied_s)]
        merged = meeting.conclude(
            own, lambda ranks: list(map(statistics.median, zip(*ranks, strict=True))), "copies of FSDP2's"
        )
        return int(merged[0]), float(merged[1])

    def _memory_speed(self, table: ModuleTable, meeting: Meeting) -> float:
        """Of copying what the largest module reduces, on the middle rank; all ranks copy, about at once."""
        with failing(meeting):
            own = memory_bytes_per_s(max(module.reduced_bytes for module in table.modules))
        return float(meeting.conclude(own, statistics.median, "copies in memory"))

    def _beside(
        self, model: nn.Module, device: torch.device, meeting: Meeting, backwards: list[Backward], alone_s: float
    ) -> Generator[None, None, tuple[Beside, Plan] | None]:
        """With communication beside compute and the plan of it, if the model lets a schedule gather its parameters."""
        try:
            attachment = attach(model, BESIDE, options=self._options)
        except CommplanError as error:
            self._notes.append(f"communication was not measured beside compute: {error}")
            return None
        with attachment, self.stepper.showing(attachment):
            self._listener.progress(f"communication beside compute: {WARM_UP_STEPS + self._settings.num_steps} steps")
            steps = yield from self._steps(model, attachment, device)
            plan = attachment.plan
            backwards.append(self._backward(steps, plan, meeting))
            own = Beside.middle([_beside_of(step, plan, alone_s) for step in steps])
            merged = meeting.conclude(
                [getattr(own, name) for name in Beside.__dataclass_fields__],
                lambda ranks: [
                    getattr(Beside.middle([Beside(*figures) for figures in ranks]), name)
                    for name in Beside.__dataclass_fields__
                ],
                "communication beside compute",
            )
            return Beside(*merged), plan


def _waited_s(step: _Step) -> dict[str, float]:
    """How long compute waited for FSDP2's own all-gather of each module that was gathered."""
    waited: dict[str, float] = defaultdict(float)
    for wait in step.report.compute_waits:
        waited[wait.op] += wait.end_s - wait.begin_s
    return {name: waited[fsdp2_gather(name)] for name in step.backwards[-1].gathers_s}


def _computed(steps: Sequence[_Step]) -> list[str]:
    """The modules that computed in any of these steps."""
    return list(dict.fromkeys(name for step in steps for name in step.backwards[-1].compute_s))


def _total_s(steps: Sequence[_Step]) -> float:
    """Compute of a backward on this rank: the sum of medians of modules."""
    return sum(statistics.median(step.backwards[-1].compute_s.get(name, 0.0) for step in steps) for name in _computed(steps))


def _beside_of(step: _Step, plan: Plan, alone_s: float) -> Beside:
    times, report = step.backwards[-1], step.report
    copied_s = {copy: seconds for copy, (_, seconds) in times.copies.items()}
    # Where a forward is run again FSDP2 may gather for it, and what waits for that is in both.
    waited_s = report.compute_wait_s() - sum(_waited_s(step).values())
    apart_s = waited_s + sum(copied_s.values()) + sum(times.gathers_s.values())
    return Beside(
        alone_s=alone_s,
        compute_s=sum(times.compute_s.values()),
        hidden_s={lane: report.hidden_s(lane) for lane in report.lanes},
        any_hidden_s=report.hidden_s(),
        overhead_s=max(times.hooks_s - apart_s, 0.0),
        num_issued=sum(isinstance(one, OpStep) and one.lane != COMPUTE_LANE for one in plan.steps),
        pack_s=copied_s[Copy.PACK],
        unpack_s=copied_s[Copy.UNPACK],
        write_s=copied_s[Copy.WRITE],
        num_written=times.copies[Copy.WRITE][0],
    )


def _is_gathered(module: Module) -> bool:
    """Whether backward has to gather its parameters."""
    return module.shard_size > 1 and module.resharded_after_forward


def _trained(attachment: Attachment) -> list[tuple[FsdpUnit, Module]]:
    """The units of the plan's modules, in its order."""
    by_name = {unit.name: unit for unit in attachment.units}
    return [(by_name[module.name], module) for module in attachment.plan.modules.modules]


def _plain(spread: Spread) -> list[float]:
    return [spread.median_s, spread.low_s, spread.high_s, spread.num]
