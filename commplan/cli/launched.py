"""Commands that run in every process of a job: their options, and the training script that they run."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from commplan.cli import EXIT_UNUSABLE, PYTHONS_GC_THRESHOLD
from commplan.language.source import did_you_mean, shown

EXIT_INCOMPLETE: Final = 1
LAST_WORD_S: Final = 2.0
"""A launcher kills all ranks when one ends with an error. Rank 0 has so much time to tell what was measured."""

ScriptArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT", help="After --: the training script, or -m MODULE, and its arguments. Default: a built-in model."
    ),
]
ModulesOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: blocks.")]
WidthOption = Annotated[int | None, typer.Option(metavar="N", min=8, help="Built-in model: width of a block.")]
BatchOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: rows of a rank's step.")]
ContextOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: tokens of a row.")]
ReplicasOption = Annotated[int | None, typer.Option(metavar="N", min=1, help="Built-in model: replicas of the mesh.")]

BUILT_IN: Final[Mapping[str, int]] = {"modules": 8, "width": 256, "batch": 2, "context": 128}
"""Size of the built-in model where nothing else is asked for: a step takes about a second on a small CPU."""


def tell(error: BaseException) -> int:
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
def told_once_a_host() -> Iterator[None]:
    """What every rank of a host would say alike is said by the first."""
    try:
        yield
    except (typer.BadParameter, typer.Exit):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise typer.Exit(EXIT_UNUSABLE) from None


def world_size(how_to_start: str) -> int:
    """How many ranks the launcher started."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise typer.BadParameter(
            f"RANK and WORLD_SIZE are not set: it runs in every process of a job; start it as `{how_to_start}`",
            param_hint="environment",
        )
    return int(os.environ["WORLD_SIZE"])


def require_torch() -> None:
    """Refuse to go on without it."""
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("torch is not installed here: `pip install torch`", param_hint="environment")


def require_sizes(sizes: Mapping[str, int | None], world_size: int, *, has_script: bool) -> None:
    """Check the options of the built-in model."""
    for name, value in sizes.items():
        if value is not None and has_script:
            raise typer.BadParameter("it is for the built-in model, and there is a script", param_hint=f"--{name}")
    width, replicas = sizes["width"], sizes["replicas"]
    if width is not None and width > 64 and width % 64:
        raise typer.BadParameter(f"beyond 64, expected a multiple of 64, not {width}", param_hint="--width")
    if replicas is not None and world_size % replicas:
        raise typer.BadParameter(f"{world_size} ranks can't be {replicas} equal replicas", param_hint="--replicas")


def work(command: Sequence[str], sizes: Mapping[str, int | None]) -> Callable[[], object]:
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


def as_python_starts() -> None:
    """A script gets the process that it knows: commands otherwise collect less garbage and end with a pipe's reader."""
    gc.set_threshold(*PYTHONS_GC_THRESHOLD)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
