"""What a person sees: headings, progress, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
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
    lanes = _lanes(rows)
    table = _table("Real compute, all models stepped in turn", lanes, "loss\nfirst", "loss\nlast", "grad\ndiff")
    table.add_column("peak KiB\nmeas/decl", justify="right", no_wrap=True)
    for row in rows:
        declared = row["declared_peak_bytes"]
        table.add_row(
            row["schedule"],
            f"{row['loss_first']:.3f}",
            f"{row['loss_last']:.3f}",
            _difference(row["max_grad_diff"]),
            *_time_cells(row, lanes),
            f"{row['peak_bytes'] / 1024:,.0f}/{'-' if declared is None else f'{declared / 1024:,.0f}'}",
        )
    table.caption = (
        "Times are medians over backwards in ms; of a lane: hidden behind compute / exposed. Gradients: largest difference to "
        "stock FSDP2, of all steps and ranks. Peak: communication buffers of the fullest rank, measured / declared by the plan."
    )
    return table


def emulated_table(rows: Sequence[Row]) -> Table:
    """The table of the part with emulated compute, fastest first."""
    lanes = _lanes(rows)
    alone_s = next(row["backward_median_s"] for row in rows if row["schedule"] == ALONE)
    table = _table("Emulated compute (sleeping), fastest first", lanes, "times\nalone")
    for row in sorted(rows, key=lambda row: float(row["backward_median_s"])):
        table.add_row(row["schedule"], f"{row['backward_median_s'] / alone_s:.2f}", *_time_cells(row, lanes))
    return table


def _lanes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(lane for row in rows for lane in row["lanes"]))


def _table(title: str, lanes: Sequence[str], *columns: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("\nschedule", no_wrap=True)
    for column in (*columns, "back-\nward", *(f"{lane}\nhid/exp" for lane in lanes)):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _time_cells(row: Row, lanes: Sequence[str]) -> list[str]:
    cells = [_milliseconds(row["backward_median_s"])]
    for lane in lanes:
        times = row["lanes"].get(lane)
        cells.append(f"{_milliseconds(times['hidden_s'])}/{_milliseconds(times['exposed_s'])}" if times else "-")
    return cells


def _difference(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.0e}" if value else "0.0"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"
