"""A measurement as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commplan.bench.figures import Result, Row

UNKNOWN: Final = "-"
MAX_REASON: Final = 300

HEAD: Final = ("schedule", "step", "middle half", "times as fast", "backward", "exposed", "peak", "gradients")
DEVICE_MEMORY: Final = "device memory"


def lines(result: Result) -> Iterator[str]:
    """The table, and what has to be said about it."""
    ranks = f"{result.world_size} rank" + ("" if result.world_size == 1 else "s")
    yield f"{result.model}; {ranks}, {result.backend} on {result.device}, torch {result.torch_release}"
    yield ""
    yield from _table(result)
    yield ""
    yield _verdict(result)
    for row in result.rows:
        if row.refusal:
            yield f"left out: {row.shown_name}: {_shortened(row.refusal)}"
    if result.is_short:
        counts = ", ".join(f"{row.shown_name} {len(row.samples)}" for row in result.rows if not row.refusal)
        yield f"short of the {result.num_steps} steps asked for; counted: {counts}"
    yield from result.notes


def _verdict(result: Result) -> str:
    best = result.best
    if best is None:
        return "nothing was measured"
    factor = result.times_as_fast(best)
    text = f"best: {best.shown_name}"
    if factor is not None and best is not result.rows[0]:
        text += f", {factor:.2f} times as fast as {result.rows[0].name}"
    if near := result.near_best():
        text += f"; these steps do not tell it apart from {', '.join(row.shown_name for row in near)}"
    return text


def _table(result: Result) -> Iterator[str]:
    has_device_memory = any(row.device_bytes is not None for row in result.rows)
    head = (*HEAD[:-1], *([DEVICE_MEMORY] if has_device_memory else []), HEAD[-1])
    rows = [_cells(result, row, has_device_memory) for row in result.rows if not row.refusal]
    widths = [max(len(cells[i]) for cells in (head, *rows)) for i in range(len(head))]
    for cells in (head, *rows):
        figures = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        yield "  ".join([cells[0].ljust(widths[0]), *figures]).rstrip()


def _cells(result: Result, row: Row, has_device_memory: bool) -> tuple[str, ...]:
    factor = result.times_as_fast(row)
    half_s = row.middle_half_s
    return (
        row.shown_name,
        _ms(row.step_s),
        UNKNOWN if half_s is None else f"{half_s[0] * 1e3:.1f} to {half_s[1] * 1e3:.1f}",
        UNKNOWN if factor is None else f"{factor:.2f}",
        _ms(row.backward_s),
        _ms(row.exposed_s),
        _size(row.peak_bytes),
        *([_size(row.device_bytes)] if has_device_memory else []),
        _gradients(result, row),
    )


def _gradients(result: Result, row: Row) -> str:
    """Whether they are stock FSDP2's; where stock differs from itself, nobody can be equal."""
    difference = row.gradient_difference
    if difference is None:
        return UNKNOWN
    if row is result.rows[0]:
        return "repeatable" if difference == 0 else f"{difference:.0e} apart"
    return "equal" if difference == 0 else f"{difference:.0e} off"


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1e3:.1f} ms"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return UNKNOWN
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.1f} KiB"


def _shortened(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 3]}..."
