"""What was measured, as plain records: steps, rows of the table, the whole."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

STOCK: Final = "stock FSDP2"
RESULT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One counted step: of one rank, or the worst of all.

    Attributes:
        step_s: from the end of one optimizer step to the end of the next.
        backward_s, exposed_s, peak_bytes: of its last backward that reduced anything, as `Attachment.stats` has them; None
            under stock FSDP2, which nothing observes.
        device_bytes: most memory of the device alive at once since the block's counted steps began; None on a CPU.
    """

    step_s: float
    backward_s: float | None = None
    exposed_s: float | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None


def worst(of_ranks: Sequence[Sample]) -> Sample:
    """The largest of each figure over the ranks."""
    return Sample(
        max(sample.step_s for sample in of_ranks),
        *(
            max((value for sample in of_ranks if (value := getattr(sample, name)) is not None), default=None)
            for name in ("backward_s", "exposed_s", "peak_bytes", "device_bytes")
        ),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """Stock FSDP2, or one schedule.

    Attributes:
        samples: its counted steps, each the worst of all ranks.
        refusal: why it could not be attached; empty if it was.
        gradient_difference: largest difference of a gradient entry from stock FSDP2's, relative to the largest entry; for
            stock itself between two runs; None: not checked.
    """

    name: str
    params: Mapping[str, int] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    refusal: str = ""
    gradient_difference: float | None = None

    @property
    def step_s(self) -> float | None:
        """Median of its steps; None before the first."""
        return self._over_steps(statistics.median, "step_s")

    @property
    def middle_half_s(self) -> tuple[float, float] | None:
        """Between which the middle half of its steps lies."""
        times_s = [sample.step_s for sample in self.samples]
        if len(times_s) < 2:
            return (times_s[0], times_s[0]) if times_s else None
        low_s, _, high_s = statistics.quantiles(times_s, n=4, method="inclusive")
        return low_s, high_s

    @property
    def backward_s(self) -> float | None:
        """Median of its backwards."""
        return self._over_steps(statistics.median, "backward_s")

    @property
    def exposed_s(self) -> float | None:
        """Median of the time in which a collective ran while compute stood still."""
        return self._over_steps(statistics.median, "exposed_s")

    @property
    def peak_bytes(self) -> int | None:
        """Most communication memory that was ever alive at once."""
        return self._over_steps(max, "peak_bytes")

    @property
    def device_bytes(self) -> int | None:
        """Most memory of the device that was ever alive at once."""
        return self._over_steps(max, "device_bytes")

    @property
    def shown_name(self) -> str:
        """Its name and params."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.params.items())])

    def _over_steps(self, combine: Callable[[list[Any]], Any], name: str) -> Any:
        values = [value for sample in self.samples if (value := getattr(sample, name)) is not None]
        return combine(values) if values else None


@dataclass(frozen=True, slots=True)
class Result:
    """A whole measurement; `rows` begins with stock FSDP2.

    Attributes:
        model: what was trained, in words.
        device: its type, as "cuda".
        backend: of the default process group.
        num_steps: counted steps that were asked for, for each row.
        notes: what a reader of the table has to know.
    """

    rows: tuple[Row, ...]
    model: str
    device: str
    backend: str
    world_size: int
    torch_release: str
    num_steps: int
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[Row, ...]:
        """The rows that have steps."""
        return tuple(row for row in self.rows if row.samples)

    @property
    def is_short(self) -> bool:
        """Whether a row that could be attached has fewer steps than were asked for."""
        return any(len(row.samples) < self.num_steps for row in self.rows if not row.refusal)

    @property
    def is_comparison(self) -> bool:
        """Whether stock FSDP2 and at least one schedule have steps, and every row that could be attached has."""
        attached = [row for row in self.rows if not row.refusal]
        return len(attached) > 1 and all(row.samples for row in attached)

    @property
    def best(self) -> Row | None:
        """The row whose median step is the shortest."""
        return min(self.measured, key=lambda row: row.step_s or 0.0, default=None)

    def times_as_fast(self, row: Row) -> float | None:
        """Stock FSDP2's median step over that of `row`: above 1 the row is faster."""
        stock_s = self.rows[0].step_s
        return None if stock_s is None or row.step_s is None else stock_s / row.step_s

    def near_best(self) -> tuple[Row, ...]:
        """Rows that these steps do not tell apart from the best: their median lies in its middle half."""
        best = self.best
        if best is None or best.middle_half_s is None:
            return ()
        high_s = best.middle_half_s[1]
        return tuple(row for row in self.measured if row is not best and row.step_s is not None and row.step_s <= high_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; seconds and bytes. What is not known is None."""
        best = self.best
        return {
            "version": RESULT_VERSION,
            "model": self.model,
            "device": self.device,
            "backend": self.backend,
            "world_size": self.world_size,
            "torch": self.torch_release,
            "steps": self.num_steps,
            "best": None if best is None else best.shown_name,
            "near_best": [row.shown_name for row in self.near_best()],
            "notes": list(self.notes),
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: Row) -> dict[str, Any]:
        return {
            "name": row.name,
            "params": dict(row.params),
            "refusal": row.refusal or None,
            "step_s": row.step_s,
            "middle_half_s": None if row.middle_half_s is None else list(row.middle_half_s),
            "ratio_native": self.times_as_fast(row),
            "backward_s": row.backward_s,
            "exposed_s": row.exposed_s,
            "peak_bytes": row.peak_bytes,
            "device_bytes": row.device_bytes,
            "gradient_difference": row.gradient_difference,
            "samples": [asdict(sample) for sample in row.samples],
        }
