"""Check commplan on the CUDA or NPU devices of this machine: `python -m device_check_run`, or `tools/device_check`.

Gradients against stock FSDP2, the order of a real run's log, overlap in device time, peak memory, and host cost. With several
devices one process drives each, by NCCL or HCCL; with one, four processes share it and gloo carries what they send.
Exit status: 0 all right, 1 something is wrong or failed, 3 no such device.
"""

from __future__ import annotations

import argparse
import json
import platform as host
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from device_check_run import launch
from device_check_run.platform import Platform, find
from device_check_run.rows import Row

COLORS = {"right": "green", "measured": "cyan", "wrong": "bold red", "failed": "bold red"}
NO_DEVICE = 3


def main(arguments: list[str] | None = None) -> int:
    """Check, show, write; the exit status."""
    parser = argparse.ArgumentParser(
        prog="tools/device_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", metavar="{auto,cuda,npu}", help="the kind of device (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="give up after this time (%(default)s)")
    options = parser.parse_args(arguments)
    if options.device not in {"auto", "cuda", "npu", "recording"}:
        parser.error(f"no kind of device {options.device!r}; there are auto, cuda, npu")
    platform = find(options.device)
    if platform is None:
        asked = "CUDA or NPU" if options.device == "auto" else options.device.upper()
        print(f"tools/device_check: torch {torch.__version__} finds no {asked} device on this machine", file=sys.stderr)
        return NO_DEVICE
    rows = launch.run(platform, options.limit)
    show(platform, rows)
    if options.json is not None:
        write(platform, rows, options.json)
    return 0 if rows and all(row.is_good for row in rows) else 1


def show(platform: Platform, rows: list[Row]) -> None:
    """Print the table."""
    console = Console()
    table = Table(title=f"commplan on {platform.describe()}, torch {torch.__version__}", title_justify="left")
    for column in ("check", "of", "is", "detail"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.check, row.subject, f"[{COLORS[row.status]}]{row.status}[/]", row.detail)
    console.print(table)


def write(platform: Platform, rows: list[Row], path: Path) -> None:
    """Write all of it as JSON."""
    of = {
        "device": platform.describe(),
        "ranks": platform.num_ranks,
        "backend": platform.backend,
        "torch": torch.__version__,
        "host": host.platform(),
        "rows": [row.to_json() for row in rows],
    }
    path.write_text(json.dumps(of, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
