"""`commplan report`: predicted and measured backwards as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import commplan
from commplan.cli import inputs
from commplan.cli.predict import read_job, read_profile, read_run, read_table, simulated_under
from commplan.language.modules import ModuleTable
from commplan.language.profiles import Profile
from commplan.plan import Plan
from commplan.sight.runs import Run
from commplan.simulate import Simulated

EXIT_TOO_LARGE: Final = 1


def report(
    inputs_: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...", help="Schedules, to be simulated; and runs that `attachment.save_run` wrote (.json)."
        ),
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", metavar="FILE", help="Of schedules: as for `simulate`.")] = None,
    modules: Annotated[
        str | None, typer.Option("--modules", metavar="N|TABLE.json", help="The same. Default: those of the runs.")
    ] = None,
    settings: inputs.SetOption = None,
    memory_cap: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The communication memory that one rank may use, as 2GiB.")
    ] = None,
    run_files: Annotated[
        list[str] | None, typer.Option("--run", metavar="FILE", help="A run, as among INPUT; may be repeated.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = Path("report.html"),
) -> None:
    """Write a page that shows backwards side by side: timelines, what was exposed and why, memory, plans.

    It is one HTML file of less than 1 MB that needs no network. Under a profile schedules are simulated, and so is the plan of
    each run, which is then shown predicted against measured. Without one, runs are shown alone. A FILE that is there is
    overwritten.

    Exit codes: 0 written; 1 a schedule has errors or deadlocks, or the page would be too large; 2 wrong usage or an unreadable
    file.
    """
    names = inputs_ or []
    paths = [name for name in names if name.endswith(".json")] + (run_files or [])
    schedules = [name for name in names if not name.endswith(".json")]
    if not schedules and not paths:
        raise typer.BadParameter("name schedules, or runs that `attachment.save_run` wrote", param_hint="INPUT")
    cap_bytes = None if memory_cap is None else inputs.read_memory_cap(memory_cap)
    runs = [read_run(path) for path in dict.fromkeys(paths)]
    costs = None if profile is None else read_profile(profile)
    simulated = list(_simulated(schedules, runs, costs, modules, settings or []))
    _write(simulated, runs, costs, cap_bytes, output)


def _write(
    simulated: Sequence[Simulated], runs: Sequence[Run], profile: Profile | None, cap_bytes: int | None, output: Path
) -> None:
    from commplan.picture import TooLargeError, content, page

    try:
        made = page(content(simulated, runs, profile, cap_bytes), f"commplan {commplan.__version__}")
    except TooLargeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_TOO_LARGE) from error
    try:
        output.write_text(made.html, encoding="utf-8", newline="\n")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {output}: {error.strerror}", param_hint="--output") from error
    for sentence in made.left_out:
        typer.echo(f"warning: {sentence}", err=True)
    told = [f"{len(simulated)} predicted"] * bool(simulated) + [f"{len(runs)} measured"] * bool(runs)
    typer.echo(f"{output}: {' and '.join(told)}, {output.stat().st_size / 1e6:.2f} MB", err=True)


def _simulated(
    schedules: Sequence[str], runs: Sequence[Run], profile: Profile | None, modules: str | None, settings: Sequence[str]
) -> Iterator[Simulated]:
    """The schedules, and the plans of runs that are none of theirs."""
    if profile is None:
        if schedules or modules is not None or settings:
            raise typer.BadParameter("schedules are simulated, which needs --profile", param_hint="INPUT")
        return
    known: set[str] = set()
    if schedules:
        job = read_job(schedules, profile, read_table(modules) if modules is not None else _table_of(runs), settings)
        known = {one.plan.digest for one in job.simulated}
        yield from job.simulated
    elif modules is not None or settings:
        raise typer.BadParameter("they are for schedules; runs have their own", param_hint="--modules, --set")
    for plan in _plans(runs):
        if plan.digest not in known:
            known.add(plan.digest)
            yield simulated_under(plan, profile)


def _plans(runs: Sequence[Run]) -> list[Plan]:
    return [run.report.plan for run in runs if run.report.plan is not None]


def _table_of(runs: Sequence[Run]) -> ModuleTable:
    """The modules of all runs."""
    tables = [plan.modules for plan in _plans(runs)]
    if not tables:
        raise typer.BadParameter("say for how many modules, as in --modules 12, or name a module table", param_hint="--modules")
    if any(table != tables[0] for table in tables):
        raise typer.BadParameter("runs are of different models: say which modules schedules are for", param_hint="--modules")
    return tables[0]
