"""`commplan bench`: which schedule is best for a job, measured on the job itself."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commplan.cli import EXIT_UNUSABLE, PYTHONS_GC_THRESHOLD, inputs, render
from commplan.cli.render import FileReport
from commplan.errors import CommplanError
from commplan.language import bind_params, library
from commplan.language.source import did_you_mean, shown
from commplan.language.spec import ScheduleSpec

if TYPE_CHECKING:
    from commplan.bench import Outcome

EXIT_INCOMPLETE: Final = 1
LAST_WORD_S: Final = 2.0
"""A launcher kills all ranks when one ends with an error. Rank 0 has so much time to tell what was measured."""

HOW_TO_START: Final = "torchrun --nproc-per-node 4 -m commplan bench --steps 50 -- train.py ARGS..."

BUILT_IN: Final[Mapping[str, int]] = {"modules": 8, "width": 256, "batch": 2, "context": 128}
"""Size of the built-in model where nothing else is asked for: a step takes about a second on a small CPU."""


def bench(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT", help="After --: the training script, or -m MODULE, and its arguments. Default: a built-in model."
        ),
    ] = None,
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
    modules: Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: blocks.")] = None,
    width: Annotated[int | None, typer.Option(metavar="N", min=8, help="Built-in model: width of a block.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: rows of a rank's step.")] = None,
    context: Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: tokens of a row.")] = None,
    replicas: Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: replicas of the mesh.")] = None,
) -> None:
    """Measure schedules on a training job: attached in turn to its model, beside stock FSDP2. Start it under torchrun.

    The script stays as it is, and is ended when enough steps were counted. docs/bench.md says what is measured.

    Exit codes: 0 measured (perhaps with fewer steps than asked for: the table says so); 1 the script failed, or ended before
    every schedule had a step, or none could be attached; 2 wrong usage, an unreadable file or a schedule with errors.
    """
    sizes = {"modules": modules, "width": width, "batch": batch, "context": context, "replicas": replicas}
    with _told_once_a_host():
        world_size = _world_size()
        _require_sizes(sizes, world_size, has_script=bool(command))
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {shown(str(json_file.absolute().parent))}", param_hint="--json")
        specs = _read_schedules(library.names() if schedules is None else schedules.split(","))
        chosen = inputs.read_settings(settings or [])
        inputs.require_declared(chosen, (param.name for spec in specs.values() for param in spec.params))
        params = {name: _params(spec, chosen) for name, spec in specs.items()}
        work = _work(command or [], sizes)
        _require_torch()
    _as_python_starts()
    from commplan.bench import Candidate, Settings, run
    from commplan.bench.script import end_process_group
    from commplan.fsdp2 import Options

    options = Options(timeout_s=timeout)
    candidates = tuple(Candidate(name, spec, params[name], options) for name, spec in specs.items())
    printer = _Printer(json_file)
    if run(Settings(candidates, steps, block, gradients), work, printer):
        end_process_group()
    if printer.exit_code and not printer.is_first:
        time.sleep(LAST_WORD_S)
    raise typer.Exit(printer.exit_code)


class _Printer:
    """Prints what a measurement tells: the table on rank 0, its own errors on every rank."""

    def __init__(self, json_file: Path | None) -> None:
        self.exit_code = EXIT_INCOMPLETE
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
            self.exit_code = _tell(outcome.error)
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


def _tell(error: BaseException) -> int:
    """What ended a script, as Python tells it; the exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr, flush=True)
        return EXIT_INCOMPLETE
    traceback.print_exception(error)
    sys.stderr.flush()
    return EXIT_INCOMPLETE


@contextmanager
def _told_once_a_host() -> Iterator[None]:
    """What every rank of a host would say alike is said by the first."""
    try:
        yield
    except (typer.BadParameter, typer.Exit):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise typer.Exit(EXIT_UNUSABLE) from None


def _world_size() -> int:
    """How many ranks the launcher started."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise typer.BadParameter(
            f"RANK and WORLD_SIZE are not set: it runs in every process of a job; start it as `{HOW_TO_START}`",
            param_hint="environment",
        )
    return int(os.environ["WORLD_SIZE"])


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("torch is not installed here: `pip install torch`", param_hint="environment")


def _require_sizes(sizes: Mapping[str, int | None], world_size: int, *, has_script: bool) -> None:
    """Check the options of the built-in model."""
    for name, value in sizes.items():
        if value is not None and has_script:
            raise typer.BadParameter("it is for the built-in model, and there is a script", param_hint=f"--{name}")
    width, replicas = sizes["width"], sizes["replicas"]
    if width is not None and width > 64 and width % 64:
        raise typer.BadParameter(f"beyond 64, expected a multiple of 64, not {width}", param_hint="--width")
    if replicas is not None and world_size % replicas:
        raise typer.BadParameter(f"{world_size} ranks can't be {replicas} equal replicas", param_hint="--replicas")


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


def _work(command: Sequence[str], sizes: Mapping[str, int | None]) -> Callable[[], object]:
    """What trains."""
    if not command:
        wanted = {**BUILT_IN, **{name: value for name, value in sizes.items() if value is not None}}

        def train() -> None:
            from commplan.bench.builtin import Size, train

            train(Size(wanted["modules"], wanted["width"], wanted["batch"], wanted["context"], wanted.get("replicas")))

        return train
    if command[0] == "-m" and len(command) == 1:
        raise typer.BadParameter("-m: of which module?", param_hint="script")
    if command[0] != "-m" and not Path(command[0]).exists():
        hint = did_you_mean(command[0], [str(path) for path in Path().glob("*.py")])
        raise typer.BadParameter(f"there is no script {shown(command[0])}" + (f"; {hint}" if hint else ""), param_hint="script")

    def work() -> None:
        from commplan.bench.script import script_runner

        script_runner(command)()

    return work


def _as_python_starts() -> None:
    """A script gets the process that it knows: commands otherwise collect less garbage and end with a pipe's reader."""
    gc.set_threshold(*PYTHONS_GC_THRESHOLD)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
