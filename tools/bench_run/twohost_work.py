"""What `twohost` measures: the record that its workers get, and the names of what is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

NATIVE: Final = "native"
NATIVE_ASYNC: Final = "native_async"
COMPUTE: Final = "compute"
REDUCE_SCATTERS: Final = "rs"
ALL_REDUCES: Final = "ar"
ALL_GATHERS: Final = "ag"
SMALL_REDUCE_SCATTERS: Final = "rs_small"
SMALL_ALL_REDUCES: Final = "ar_small"
SMALL_ALL_GATHERS: Final = "ag_small"
SMALL: Final = (SMALL_REDUCE_SCATTERS, SMALL_ALL_REDUCES, SMALL_ALL_GATHERS)
"""Collectives of one element a rank, each waited for before the next: what is left of them is latency."""
COPIES: Final = "copies"
"""Copies of each module's gradient into fresh memory."""
COSTS: Final = (REDUCE_SCATTERS, ALL_REDUCES, *SMALL, COPIES)
"""What a calibration takes besides backwards."""
NOT_SCHEDULES: Final = (NATIVE, NATIVE_ASYNC, COMPUTE, REDUCE_SCATTERS, ALL_REDUCES, ALL_GATHERS)

REAL: Final = "real"
NUM_BEST: Final = 5
RANKS_PER_HOST: Final = 2
MESH: Final = (2, RANKS_PER_HOST)
"""Replicas, one a host, and the ranks that share one."""
WORLD_SIZE: Final = MESH[0] * MESH[1]


@dataclass(frozen=True)
class Work:
    """What to measure.

    Attributes:
        schedules: library names; what `attach` refuses is left out.
        settings: milliseconds of backward compute a module, as text, or "real"; all schedules take part in the first.
        num_modules: modules of one weight, or blocks of a transformer where compute is real.
        dim: rows and columns of the weight.
        rounds: in each, everything is measured once; the first round, a warm-up, is not among them.
        timeout_s: how long a collective may take.
        num_best: schedules, the fastest ones of the setting before, that take part in every setting but the first.
        beside: what is measured in turn with the schedules.
    """

    schedules: tuple[str, ...]
    settings: tuple[str, ...] = ("180",)
    num_modules: int = 12
    dim: int = 1448
    rounds: int = 5
    timeout_s: float = 60.0
    num_best: int = NUM_BEST
    beside: tuple[str, ...] = NOT_SCHEDULES

    def longest_s(self, rate_mbit: float) -> float:
        """About the seconds of a backward in which nothing overlaps, over a link of `rate_mbit`."""
        compute_s = max((float(setting) for setting in self.settings if setting != REAL), default=0.0) / 1e3
        return self.num_modules * (compute_s + self.dim**2 * 32 / (rate_mbit * 1e6))

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Work:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


Times = Mapping[str, Sequence[Sequence[float]]]
"""What was measured -> seconds of each rank in each round: `times[name][rank][round]`."""


def slowest_s(times: Times) -> dict[str, list[float]]:
    """Seconds of the slowest rank in each round."""
    return {name: [max(of_round) for of_round in zip(*by_rank, strict=True)] for name, by_rank in times.items()}


def best_schedules(times: Times) -> list[str]:
    """Names of the schedules, the fastest median first."""
    medians = {name: median(found) for name, found in slowest_s(times).items() if name not in (*NOT_SCHEDULES, *COSTS)}
    return sorted(medians, key=lambda name: medians[name])
