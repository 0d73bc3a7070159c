"""What a person reads about one backward, run or predicted: lanes, and the reason why each collective was exposed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commplan.sight.explain import Explainer, Run
from commplan.sight.intervals import length, union
from commplan.sight.report import BackwardReport

# Rows of exposed ops that a table shows.
MAX_ROWS = 12

ALL_LANES = "all"

TEXTS = frozenset({"lane", "exposed op", "why"})
"""Columns that hold words."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Of each op, for each time it ran: when its last peer arrived (seconds on this rank's clock), and which rank that was.

    Attributes:
        error_s: how far times of other ranks may be off, clocks of devices included.
        num_clocks: of how many hosts the clocks were compared.
    """

    last_peers: Mapping[str, Sequence[tuple[float, int]]]
    error_s: float
    num_clocks: int


@dataclass(frozen=True, slots=True)
class LaneReport:
    """Seconds of one lane, or of all together (`lane` "all"); hidden, exposed and idle add up to the backward.

    `peers_s` is the part of hidden and exposed in which a collective waited for a peer that had not begun it; None: not known.
    """

    lane: str
    hidden_s: float
    exposed_s: float
    idle_s: float
    peers_s: float | None


@dataclass(frozen=True, slots=True)
class OpReport:
    """One collective of the backward: seconds that it ran, of these exposed, of these waiting for peers; why it was exposed."""

    op: str
    module: str
    lane: str
    ran_s: float
    exposed_s: float
    peers_s: float | None
    last_rank: int | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """One backward of one rank. `str` is a table, `to_dict` goes into JSON.

    Attributes:
        rank: None for a prediction.
        backward: its number, from 1.
        compute_wait_s: time in which compute stood still.
        ops: lane by lane, in the order in which they ran.
        clock_error_s: how far times of peers may be off; None: nobody asked them.
        num_hosts: whose clocks were compared; 0: none.
        device_clock_error_s: how far this rank's own times may be off, where a device told them.
    """

    rank: int | None
    schedule: str
    backward: int
    backward_s: float
    compute_wait_s: float
    peak_bytes: int
    declared_peak_bytes: int
    lanes: tuple[LaneReport, ...]
    ops: tuple[OpReport, ...]
    clock_error_s: float | None
    num_hosts: int
    device_clock_error_s: float

    @property
    def exposed_ops(self) -> tuple[OpReport, ...]:
        """The collectives that ran while compute stood still, the longest first."""
        return tuple(sorted((op for op in self.ops if op.exposed_s > 0), key=lambda op: -op.exposed_s))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; times in seconds."""
        return asdict(self, dict_factory=_with_lists)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def describe_backward(report: BackwardReport, rank: int | None = None, arrivals: Arrivals | None = None) -> Report:
    """The report of one backward; without `arrivals` nothing is known of peers. Without a rank it is a prediction."""
    explainer = Explainer(report) if arrivals is None else Explainer(report, arrivals.last_peers, arrivals.error_s)
    lanes = tuple(_lane(report, lane, explainer.runs, arrivals) for lane in (*report.lanes, None))
    return Report(
        rank,
        "" if report.plan is None else report.plan.schedule,
        report.number,
        report.duration_s,
        report.compute_wait_s(),
        report.peak_bytes,
        report.declared_peak_bytes,
        lanes,
        tuple(_op(explainer, run) for run in explainer.runs),
        None if arrivals is None else arrivals.error_s,
        0 if arrivals is None else arrivals.num_clocks,
        report.clock_error_s,
    )


def _lane(report: BackwardReport, lane: str | None, runs: Sequence[Run], arrivals: Arrivals | None) -> LaneReport:
    peers = [run.peers_span for run in runs if lane is None or run.interval.lane == lane]
    return LaneReport(
        lane or ALL_LANES,
        report.hidden_s(lane),
        report.exposed_s(lane),
        report.idle_s(lane),
        None if arrivals is None else length(union(peers)),
    )


def _op(explainer: Explainer, run: Run) -> OpReport:
    begin_s, end_s = run.peers_span
    knows_peers = run.last_peer is not None
    return OpReport(
        run.interval.op,
        explainer.module_of(run),
        run.interval.lane,
        run.interval.end_s - run.interval.begin_s,
        explainer.exposed_s(run),
        end_s - begin_s if knows_peers else None,
        run.last_peer[1] if run.last_peer is not None else None,
        explainer.reasons(run),
    )


def _with_lists(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in pairs}


# The text.


def _lines(report: Report) -> Iterator[str]:
    is_run = report.rank is not None
    which = f"backward {report.backward} on rank {report.rank}" if is_run else "predicted"
    declared = f", {report.declared_peak_bytes:,} declared" if is_run else ""
    yield (
        f"{report.schedule}, {which}: {_ms(report.backward_s)}, compute stood still for {_ms(report.compute_wait_s)}; "
        f"{report.peak_bytes:,} bytes at most{declared}"
    )
    if is_run:
        yield _clocks(report)
    yield ""
    columns = ("lane", "hidden", "exposed", "idle", *(("for peers",) if is_run else ()))
    rows = [(lane.lane, *map(_ms, (lane.hidden_s, lane.exposed_s, lane.idle_s, lane.peers_s))) for lane in report.lanes]
    yield from table(columns, [row[: len(columns)] for row in rows])
    yield ""
    exposed = report.exposed_ops
    if not exposed:
        yield "No collective was exposed."
        return
    rows = []
    for op in exposed[:MAX_ROWS]:
        first, *rest = op.reasons
        rows.append((f"{op.op} ({op.module or '(root)'})", op.lane, _ms(op.ran_s), _ms(op.exposed_s), first))
        rows.extend(("", "", "", "", reason) for reason in rest)
    yield from table(("exposed op", "lane", "ran", "exposed", "why"), rows)
    if len(exposed) > MAX_ROWS:
        yield f"and {len(exposed) - MAX_ROWS} more, exposed for {_ms(exposed[MAX_ROWS].exposed_s)} at most"


def _clocks(report: Report) -> str:
    own = f"times of the device are right to {_ms(report.device_clock_error_s)}; " if report.device_clock_error_s else ""
    if report.clock_error_s is None:
        return f"{own}peers were not asked (local=True)"
    if report.num_hosts == 1 and not report.clock_error_s:
        return f"{own}all ranks read one clock"
    return f"{own}clocks of {report.num_hosts} host(s), times of peers are right to {_ms(report.clock_error_s)}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], texts: Collection[str] = TEXTS) -> Iterator[str]:
    """Lines with columns as wide as they need; all but `texts` are figures, to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if name in texts else cell.rjust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.2f} ms"
