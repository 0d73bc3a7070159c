"""`commplan profile`: what a live job's compute and communication cost, measured on the job itself."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commplan.cli import EXIT_UNUSABLE, launched
from commplan.cli.files import require_places, told_if_replaced, write_whole

if TYPE_CHECKING:
    from commplan.calibrate import Outcome

HOW_TO_START: Final = "torchrun --nproc-per-node 4 -m commplan profile --output profile.yaml -- train.py ARGS..."


def profile(
    command: launched.ScriptArgument = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where rank 0 writes the profile.")] = Path(
        "profile.yaml"
    ),
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the model's module table there, too.")] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Counted steps without communication beside compute, and as many with.")
    ] = 10,
    budget: Annotated[float, typer.Option(metavar="S", min=1.0, help="About how long all collectives are measured.")] = 60.0,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="Seconds that one collective, or another rank, may take.")
    ] = 120.0,
    modules: launched.ModulesOption = None,
    width: launched.WidthOption = None,
    batch: launched.BatchOption = None,
    context: launched.ContextOption = None,
    replicas: launched.ReplicasOption = None,
) -> None:
    """Measure what compute and communication of a training job cost, and write a profile. Start it under torchrun.

    The script stays as it is, and is ended when everything was measured. The profile is for simulate, compare and tune, with
    --table FILE as their --modules; docs/profile.md says what is measured and how.

    Exit codes: 0 written; 1 the script failed, or ended too early, or the measurement failed; 2 wrong usage, or a file that
    can't be written.
    """
    sizes = {"modules": modules, "width": width, "batch": batch, "context": context, "replicas": replicas}
    with launched.told_once_a_host():
        world_size = launched.world_size(HOW_TO_START)
        launched.require_sizes(sizes, world_size, has_script=bool(command))
        if os.environ["RANK"] == "0":
            require_places({"--output": output, "--table": table})
        work = launched.work(command or [], sizes)
        launched.require_torch()
    launched.as_python_starts()
    from commplan.bench.script import end_process_group
    from commplan.calibrate import Limits, Settings, run

    writer = _Writer(output, table)
    settings = Settings(steps, Limits(budget, timeout), shlex.join(["commplan", *sys.argv[1:]]))
    if run(settings, work, writer):
        end_process_group()
    if writer.exit_code and not writer.is_first:
        time.sleep(launched.LAST_WORD_S)
    raise typer.Exit(writer.exit_code)


class _Writer:
    """Writes what was measured, whole or not at all, and tells of it on rank 0; its own errors on every rank."""

    def __init__(self, output: Path, table: Path | None) -> None:
        self.exit_code = launched.EXIT_INCOMPLETE
        self.is_first = os.environ["RANK"] == "0"
        self._output, self._table = output, table

    def progress(self, line: str) -> None:
        """On standard error."""
        if self.is_first:
            print(f"commplan profile: {line}", file=sys.stderr, flush=True)

    def outcome(self, outcome: Outcome) -> None:
        """The files, and what went wrong on standard error."""
        if outcome.error is not None:
            self.exit_code = launched.tell(outcome.error)
        elif outcome.problem:
            self.progress(outcome.problem)
        else:
            self.exit_code = 0
        found = outcome.calibrated
        if found is None or not self.is_first:
            return
        try:
            if self._table is not None:
                told_if_replaced(self._table)
                write_whole(self._table, found.table.model_dump_json(indent=2) + "\n")
            told_if_replaced(self._output)
            write_whole(self._output, found.profile)
        except OSError as error:
            self.exit_code = EXIT_UNUSABLE
            self.progress(f"{error.filename}: {error.strerror or error}")
            return
        told = [*found.summary, f"{self._output}: the profile"]
        if self._table is not None:
            told.append(f"{self._table}: the module table")
        print("\n".join(told), flush=True)
