"""What happened in one backward: when each op ran, when compute stood still, how much memory was alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commplan.plan.model import Plan
from commplan.sight.intervals import Interval, Spans, intersect, length, spans, union


@dataclass(frozen=True, slots=True)
class BackwardReport:
    """One backward of one rank; times are `time.perf_counter` seconds, from its first hook (or, on a CPU, from a wait for
    parameters of a forward that is run again before it) to the end of root.

    At each moment of the backward a lane is either hidden, exposed or idle.

    Attributes:
        ops: collectives as they ran, an op waiting for its peers included.
        compute_waits: when compute stood still for communication; `op` is the number of the plan's step, "" in root's end, or
            `fsdp2_gather` of a module.
        peak_bytes: most communication memory alive at once.
        declared_peak_bytes: what the plan says, with what accumulation and the arrival of gradients change.
        number: of this attachment's backwards, counted from 1.
        plan: what was run.
        ranks_of: the ranks of each op's process group; ops without peers are not in it.
        memory: when, on the host, how many bytes of communication memory were alive from then on.
    """

    begin_s: float
    end_s: float
    ops: Sequence[Interval]
    compute_waits: Sequence[Interval]
    peak_bytes: int
    declared_peak_bytes: int
    number: int = 0
    plan: Plan | None = None
    ranks_of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    memory: Sequence[tuple[float, int]] = ()

    @property
    def duration_s(self) -> float:
        """Seconds from the first hook to the end of root; on a device, at least until the last op's end there."""
        return max([self.end_s, *(i.end_s for i in (*self.ops, *self.compute_waits))]) - self.begin_s

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes on which collectives ran."""
        return tuple(dict.fromkeys(i.lane for i in self.ops))

    @property
    def clock_error_s(self) -> float:
        """How far times of ops and waits may be from this rank's clock: more than 0 where a device told them."""
        return float(getattr(self.ops, "clock_error_s", 0.0))

    def exposed_s(self, lane: str | None = None) -> float:
        """Seconds in which a collective (of `lane`) ran while compute stood still."""
        return length(intersect(self._busy(lane), union(spans(self.compute_waits))))

    def hidden_s(self, lane: str | None = None) -> float:
        """Seconds in which a collective (of `lane`) ran while compute went on."""
        return length(self._busy(lane)) - self.exposed_s(lane)

    def idle_s(self, lane: str | None = None) -> float:
        """Seconds of the backward in which no collective (of `lane`) ran."""
        return self.duration_s - length(self._busy(lane))

    def compute_wait_s(self) -> float:
        """Seconds in which compute stood still, whether or not a collective ran meanwhile."""
        return length(union(spans(self.compute_waits)))

    def _busy(self, lane: str | None) -> Spans:
        return union(spans(i for i in self.ops if lane is None or i.lane == lane))


def fsdp2_gather(module: str) -> str:
    """What compute waits for where FSDP2 gathers a module's parameters by itself, and no step of the plan does."""
    return f"FSDP2's all-gather of module {module or '(root)'!r}"


def step_of(wait: Interval) -> int | None:
    """The number of the plan's step at which compute waited; None at the end of root, and where it was not the plan."""
    return int(wait.op) if wait.op.isdecimal() else None


def stats(report: BackwardReport) -> dict[str, float]:
    """The figures of one backward under the keys of a logger, in seconds and bytes."""
    found: dict[str, float] = {
        "commplan/backward_s": report.duration_s,
        "commplan/compute_wait_s": report.compute_wait_s(),
        "commplan/peak_bytes": report.peak_bytes,
        "commplan/declared_peak_bytes": report.declared_peak_bytes,
    }
    for lane in (None, *report.lanes):
        scope = "commplan" if lane is None else f"commplan/{lane}"
        found[f"{scope}/hidden_s"] = report.hidden_s(lane)
        found[f"{scope}/exposed_s"] = report.exposed_s(lane)
        found[f"{scope}/idle_s"] = report.idle_s(lane)
    return found
