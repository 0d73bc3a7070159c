"""What a person sees: headings, progress, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from demo_run.report import Row
from demo_run.settings import ALONE

_PART = {"train": "training steps", "emulate": "emulated backwards"}
_LINE_EVERY = 10


def heading(console: Console, text: str) -> None:
    """A line above a part."""
    console.print(f"\n[bold]{text}[/bold]")


@contextmanager
def progress(console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A place to tell events of the workers: bars on a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        yield lambda event: _tell_line(console, event)
        return
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars:
        tasks: dict[str, Any] = {}

        def tell(event: dict[str, Any]) -> None:
            part = event["part"]
            if part not in tasks:
                tasks[part] = bars.add_task(_PART[part], total=event["of"], note="")
            bars.update(tasks[part], completed=event["step"], note=_note(event))

        yield tell


def _tell_line(console: Console, event: dict[str, Any]) -> None:
    step, of = event["step"], event["of"]
    if step == 1 or step == of or step % _LINE_EVERY == 0:
        console.print(f"  {_PART[event['part']]} {step}/{of} {_note(event)}".rstrip(), highlight=False)


def _note(event: dict[str, Any]) -> str:
    return f"loss {event['loss']:.3f}" if "loss" in event else ""


def training_table(rows: Sequence[Row]) -> Table:
    """The table that the training part ends in."""
    lanes = list(dict.fromkeys(lane for row in rows for lane in row["lanes"]))
    table = Table("schedule", title="Real compute: one row a model, steps interleaved", title_justify="left")
    for column in ("loss first", "last", "largest grad\ndifference", "backward\nmedian ms"):
        table.add_column(column, justify="right")
    _add_lane_columns(table, lanes)
    for column in ("peak KiB\nmeasured", "declared"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["schedule"],
            f"{row['loss_first']:.4f}",
            f"{row['loss_last']:.4f}",
            "not finite" if row["max_grad_diff"] is None else f"{row['max_grad_diff']:.1f}",
            _milliseconds(row["backward_median_s"]),
            *_lane_cells(row, lanes),
            f"{row['peak_bytes'] / 1024:,.0f}",
            "-" if row["declared_peak_bytes"] is None else f"{row['declared_peak_bytes'] / 1024:,.0f}",
        )
    return table


def emulated_table(rows: Sequence[Row]) -> Table:
    """The table of the part with emulated compute, fastest first."""
    lanes = list(dict.fromkeys(lane for row in rows for lane in row["lanes"]))
    alone_s = next(row["backward_median_s"] for row in rows if row["schedule"] == ALONE)
    table = Table("schedule", title="Emulated compute (sleeping): fastest first", title_justify="left")
    for column in ("backward\nmedian ms", "times\ncompute alone"):
        table.add_column(column, justify="right")
    _add_lane_columns(table, lanes)
    for row in sorted(rows, key=lambda row: float(row["backward_median_s"])):
        table.add_row(
            row["schedule"],
            _milliseconds(row["backward_median_s"]),
            f"{row['backward_median_s'] / alone_s:.2f}",
            *_lane_cells(row, lanes),
        )
    return table


def _add_lane_columns(table: Table, lanes: Sequence[str]) -> None:
    for lane in lanes:
        table.add_column(f"{lane} lane ms\nhidden + exposed", justify="right")


def _lane_cells(row: Row, lanes: Sequence[str]) -> list[str]:
    return [
        f"{_milliseconds(row['lanes'][lane]['hidden_s'])} + {_milliseconds(row['lanes'][lane]['exposed_s'])}"
        if lane in row["lanes"]
        else "-"
        for lane in lanes
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
