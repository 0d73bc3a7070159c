"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Row:
    """One line of the table. `status` is "right", "wrong", "failed" (it raised) or "measured"."""

    check: str
    subject: str
    status: str
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return self.status in {"right", "measured"}

    def to_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return asdict(self)


def merge(of_ranks: list[list[Row]]) -> list[Row]:
    """One row for each line that all ranks have: the first bad one, else rank 0's."""
    merged = []
    for rows in zip(*of_ranks, strict=False):
        bad = [(rank, row) for rank, row in enumerate(rows) if not row.is_good]
        row = rows[0]
        if bad:
            rank, row = bad[0]
            row.detail = f"rank {rank}: {row.detail}"
        merged.append(row)
    return merged
