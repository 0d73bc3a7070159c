"""`commplan bench`: which schedule is best for a job, measured on the job itself."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commplan.cli import EXIT_UNUSABLE, inputs, launched, render
from commplan.cli.render import FileReport
from commplan.errors import CommplanError
from commplan.language import bind_params, library
from commplan.language.source import shown
from commplan.language.spec import ScheduleSpec

if TYPE_CHECKING:
    from commplan.bench import Outcome

HOW_TO_START: Final = "torchrun --nproc-per-node 4 -m commplan bench --steps 50 -- train.py ARGS..."


def bench(
    command: launched.ScriptArgument = None,
    schedules: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Schedules: names of the library's, or files. Default: the whole library."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Counted steps of stock FSDP2 and of each schedule.")] = 50,
    block: Annotated[int, typer.Option(metavar="N", min=1, help="Counted steps between two switches.")] = 10,
    settings: inputs.SetOption = None,
    gradients: Annotated[
        bool, typer.Option("--gradients/--no-gradients", help="Compare the gradients of one step with stock FSDP2's.")
    ] = True,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=1.0, help="Seconds that one collective, or another rank, may take.")
    ] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
    modules: launched.ModulesOption = None,
    width: launched.WidthOption = None,
    batch: launched.BatchOption = None,
    context: launched.ContextOption = None,
    replicas: launched.ReplicasOption = None,
) -> None:
    """Measure schedules on a training job: attached in turn to its model, beside stock FSDP2. Start it under torchrun.

    The script stays as it is, and is ended when enough steps were counted. docs/bench.md says what is measured.

    Exit codes: 0 measured (perhaps with fewer steps than asked for: the table says so); 1 the script failed, or ended before
    every schedule had a step, or none could be attached; 2 wrong usage, an unreadable file or a schedule with errors.
    """
    sizes = {"modules": modules, "width": width, "batch": batch, "context": context, "replicas": replicas}
    with launched.told_once_a_host():
        world_size = launched.world_size(HOW_TO_START)
        launched.require_sizes(sizes, world_size, has_script=bool(command))
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {shown(str(json_file.absolute().parent))}", param_hint="--json")
        specs = _read_schedules(library.names() if schedules is None else schedules.split(","))
        chosen = inputs.read_settings(settings or [])
        inputs.require_declared(chosen, (param.name for spec in specs.values() for param in spec.params))
        params = {name: _params(spec, chosen) for name, spec in specs.items()}
        work = launched.work(command or [], sizes)
        launched.require_torch()
    launched.as_python_starts()
    from commplan.bench import Candidate, Settings, run
    from commplan.bench.script import end_process_group
    from commplan.fsdp2 import Options

    options = Options(timeout_s=timeout)
    candidates = tuple(Candidate(name, spec, params[name], options) for name, spec in specs.items())
    printer = _Printer(json_file)
    if run(Settings(candidates, steps, block, gradients), work, printer):
        end_process_group()
    if printer.exit_code and not printer.is_first:
        time.sleep(launched.LAST_WORD_S)
    raise typer.Exit(printer.exit_code)


class _Printer:
    """Prints what a measurement tells: the table on rank 0, its own errors on every rank."""

    def __init__(self, json_file: Path | None) -> None:
        self.exit_code = launched.EXIT_INCOMPLETE
        self._json_file = json_file
        self.is_first = os.environ["RANK"] == "0"

    def progress(self, line: str) -> None:
        """On standard error."""
        if self.is_first:
            print(f"commplan bench: {line}", file=sys.stderr, flush=True)

    def outcome(self, outcome: Outcome) -> None:
        """The table on standard output, and what went wrong on standard error."""
        from commplan.bench.table import lines

        if outcome.result is not None and self.is_first:
            print("\n".join(["", *map(render.visible, lines(outcome.result))]), flush=True)
        if outcome.error is not None:
            self.exit_code = launched.tell(outcome.error)
        elif outcome.result is None:
            self.progress(outcome.problem)
        elif outcome.result.is_comparison:
            self.exit_code = 0
        if outcome.result is not None and self.is_first and self._json_file is not None:
            try:
                self._json_file.write_text(json.dumps(outcome.result.to_dict(), indent=2) + "\n", encoding="utf-8")
            except OSError as error:
                self.exit_code = EXIT_UNUSABLE
                self.progress(f"{self._json_file}: {error.strerror or error}")


def _read_schedules(names: Sequence[str]) -> dict[str, ScheduleSpec]:
    """The schedules of these names; prints every finding where one can't be read."""
    found: dict[str, ScheduleSpec] = {}
    reports: list[FileReport] = []
    for name in filter(None, (name.strip() for name in names)):
        if name == inputs.STDIN:
            raise typer.BadParameter("every rank reads it, so it can't be standard input", param_hint="--schedules")
        if name in found:
            raise typer.BadParameter(f"{shown(name)} is named twice", param_hint="--schedules")
        report, spec = inputs.read_schedule(name)
        if spec is None:
            reports.append(report)
        else:
            found[name] = spec
    if reports:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            render.console(stderr=True).print(render.report_text(reports), end="")
        raise typer.Exit(EXIT_UNUSABLE)
    if not found:
        raise typer.BadParameter("name at least one", param_hint="--schedules")
    return found


def _params(spec: ScheduleSpec, chosen: Mapping[str, int]) -> dict[str, int]:
    declared = {param.name for param in spec.params}
    params = {name: value for name, value in chosen.items() if name in declared}
    try:
        bind_params(spec, params)
    except CommplanError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error
    return params
