"""`commplan tune`: a schedule for one job, found by simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from commplan import compiler
from commplan.cli import inputs, render
from commplan.cli.difference import difference_text
from commplan.cli.predict import ModulesOption, ProfileOption, read_profile
from commplan.cli.start import checked_name, written
from commplan.errors import CommplanError
from commplan.language.fields import UNIT_BYTES
from commplan.plan.diff import diff
from commplan.sight.figures import table
from commplan.tune import NEARLY, Found, Goal, NothingFitsError, Search

EXIT_NOTHING: Final = 1
MAX_ROWS: Final = 5


def tune(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the schedule is called; its file is NAME.yaml.")],
    profile: ProfileOption,
    modules: ModulesOption,
    memory_cap: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most communication memory of one rank, as 2GiB.")
    ] = None,
    bit_equal: Annotated[
        bool, typer.Option("--bit-equal", help="No buckets and no pieces: gradients equal FSDP2's bit for bit on any mesh.")
    ] = False,
) -> None:
    """Look for the schedule that is fastest under a profile, and write it to NAME.yaml. No file is overwritten.

    Offsets, waits, buckets, pieces, lanes and the gathering of parameters are tried, from several starts, and the library. What
    comes out is never slower than the best of the library, and the same each time. Wire dtypes are not tried: how exact
    gradients are is for you to say. It prints how it differs from the best of the library.

    Exit codes: 0 written; 1 nothing keeps the cap; 2 wrong usage, an unreadable file, or NAME.yaml exists.
    """
    name = checked_name(name)
    if Path(f"{name}.yaml").exists():
        raise typer.BadParameter(f"{name}.yaml exists already; it was left as it is")
    cap_bytes = None if memory_cap is None else inputs.read_memory_cap(memory_cap)
    module_table = compiler.module_table(inputs.read_modules(modules))
    goal = Goal(module_table, read_profile(profile), cap_bytes, bit_equal)
    search = Search(goal, name)
    try:
        best = search.best(lambda tried, seconds: typer.echo(f"tried {tried}: {_ms(seconds)} at best", err=True))
    except NothingFitsError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_NOTHING) from error
    except CommplanError as error:
        raise typer.BadParameter(str(error), param_hint="--profile") from error
    ranking = search.library_ranking()
    path = written(name, _text(best, ranking, goal, name))
    if goal.profile.has_jitter:
        typer.echo(f"jitter: predictions are means of {search.num_draws} draws\n")
    typer.echo("\n".join(_shown(best, ranking)))
    if ranking and best.candidate is not None:
        render.console().print(difference_text(diff(ranking[0].simulated.plan, best.simulated.plan)), end="")
        typer.echo("")
    if (leaner := _leaner(search, best)) is not None:
        cap, found = leaner
        typer.echo(f"with --memory-cap {cap}: {_ms(found.seconds)}, {_mib(found.peak_bytes)}\n")
    typer.echo(f"wrote {path}; next: commplan check {path}")


def _leaner(search: Search, best: Found) -> tuple[str, Found] | None:
    """A cap under which this command finds something that is nearly as fast as `best` with less memory, and what it finds."""
    leanest = search.leanest_beside(best)
    if leanest is None:
        return None
    try:
        found = Search(replace(search.goal, memory_cap_bytes=leanest.peak_bytes), search.name).best()
    except NothingFitsError:
        # Under a cap a search goes other ways, and may not come there.
        return None
    if found.seconds > best.seconds * (1 + NEARLY):
        return None
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if leanest.peak_bytes % UNIT_BYTES[unit] == 0), "")
    return f"{leanest.peak_bytes // UNIT_BYTES.get(unit, 1)}{unit}", found


def _text(best: Found, ranking: list[Found], goal: Goal, name: str) -> str:
    modules, profile = len(goal.table), goal.profile.name
    if best.candidate is None:
        tried = f"Nothing that was tried is faster by more than {NEARLY:.1%} for {modules} modules under the profile {profile}."
        return f"# {tried}\n{best.text}"
    against = f", {ranking[0].seconds / best.seconds:.3f} times as fast as {_schedule(ranking[0])}" if ranking else ""
    found = f"Found by `commplan tune` for {modules} modules under the profile {profile}."
    memory = f"{_mib(best.peak_bytes)} of communication memory at most"
    summary = f"{found}\nPredicted: {_ms(best.seconds)}{against}; {memory}."
    return best.candidate.text(name, summary)


def _shown(best: Found, ranking: list[Found]) -> Iterator[str]:
    rows = [best, *(found for found in ranking[:MAX_ROWS] if found is not best)]
    head = ("schedule", "predicted", "of the best", "peak")
    yield from table(
        head,
        [(_schedule(f), _ms(f.seconds), f"{f.seconds / best.seconds:.3f}", _mib(f.peak_bytes)) for f in rows],
        texts=("schedule",),
    )
    yield ""


def _schedule(found: Found) -> str:
    return found.simulated.plan.schedule


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
