"""A backward of one rank as a file, for traces and reports that are made elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from commplan.errors import CommplanError, PlanError
from commplan.plan.model import Plan
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport, step_of

FORMAT: Final = "commplan.run"
VERSION: Final = 1


@dataclass(frozen=True)
class Run:
    """A backward of one rank.

    Attributes:
        coordinates: of the rank in the model's mesh, by axis.
        wall_s: what the wall clock (`time.time`) was ahead of the clock of the report; it lays ranks beside each other.
    """

    rank: int
    coordinates: Mapping[str, int]
    wall_s: float
    report: BackwardReport

    @property
    def name(self) -> str:
        """The rank, by its place in the mesh."""
        place = ", ".join(f"{axis} {at}" for axis, at in self.coordinates.items())
        return f"rank {self.rank} ({place})" if place else f"rank {self.rank}"

    def to_json(self) -> str:
        """Plain data; times in seconds of the report's clock. `from_json` is the inverse."""
        report = self.report
        data = {
            "format": FORMAT,
            "version": VERSION,
            "rank": self.rank,
            "coordinates": dict(self.coordinates),
            "wall_s": self.wall_s,
            "backward": report.number,
            "begin_s": report.begin_s,
            "end_s": report.end_s,
            "ops": [[i.op, i.lane, i.begin_s, i.end_s, i.issued_s] for i in report.ops],
            "compute_waits": [[i.op, i.begin_s, i.end_s] for i in report.compute_waits],
            "memory": [list(point) for point in report.memory],
            "peak_bytes": report.peak_bytes,
            "declared_peak_bytes": report.declared_peak_bytes,
            "plan": None if report.plan is None else json.loads(report.plan.to_json()),
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str, file: str = "<text>") -> Run:
        """The run in `text`; `file` names it in messages.

        Raises:
            CommplanError: it is no run, or one of another version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CommplanError(f"{file}: not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CommplanError(f"{file}: not a saved run: `attachment.save_run` writes them")
        if data.get("version") != VERSION:
            raise CommplanError(f"{file}: a run of version {data.get('version')}; this commplan reads version {VERSION}")
        try:
            return _read(data)
        except (KeyError, TypeError, ValueError, OverflowError, PlanError) as error:
            raise CommplanError(f"{file}: not a whole run: {error}") from error


def _read(data: Mapping[str, Any]) -> Run:
    plan = None if data["plan"] is None else Plan.from_json(json.dumps(data["plan"]))
    num_steps = 0 if plan is None else len(plan.steps)
    report = BackwardReport(
        _finite(data["begin_s"]),
        _finite(data["end_s"]),
        [Interval(str(op), str(lane), *_seconds(times)) for op, lane, *times in data["ops"]],
        [Interval(str(op), "compute", *_seconds(times)) for op, *times in data["compute_waits"]],
        int(data["peak_bytes"]),
        int(data["declared_peak_bytes"]),
        int(data["backward"]),
        plan,
        memory=[(_finite(at_s), int(size_bytes)) for at_s, size_bytes in data["memory"]],
    )
    for wait in report.compute_waits:
        number = step_of(wait)
        if plan is not None and number is not None and number >= num_steps:
            raise ValueError(f"compute waits at step {number} of a plan of {num_steps}")
    return Run(int(data["rank"]), {str(k): int(v) for k, v in data["coordinates"].items()}, _finite(data["wall_s"]), report)


def _seconds(times: Sequence[Any]) -> list[Any]:
    """Begin and end; when it was issued may not be known."""
    begin_s, end_s, *issued = times
    return [_finite(begin_s), _finite(end_s), *(None if at is None else _finite(at) for at in issued)]


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return float(value)
