"""`commplan simulate`, `commplan compare` and `commplan trace`: what schedules would cost, and what they did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

import typer

from commplan import compiler
from commplan.cli import EXIT_UNUSABLE, inputs, render
from commplan.cli.render import FileReport
from commplan.errors import CommplanError, ScheduleError
from commplan.language.modules import ModuleTable
from commplan.language.profiles import Profile, load_profile
from commplan.language.source import load_text
from commplan.plan import Plan
from commplan.sight.figures import describe_backward, table
from commplan.sight.measured import processes
from commplan.sight.runs import Run
from commplan.sight.trace import trace
from commplan.simulate import (
    DeadlockError,
    Draws,
    Simulated,
    compute_alone,
    costs,
    draw,
    draws,
    limits,
    memory,
    report,
    simulate,
)
from commplan.simulate.tracing import process

EXIT_ERRORS: Final = 1
MAX_COLUMNS: Final = 160
MAX_RUN_BYTES: Final = 1 << 28
MIN_DRAWS: Final = 10
MAX_DRAWS: Final = 1_000


class Format(StrEnum):
    """How `simulate` prints."""

    TEXT = "text"
    JSON = "json"


Schedules = Annotated[
    list[str], typer.Argument(metavar="SCHEDULE...", help="Schedule files, or names of the library; - for standard input.")
]
ProfileOption = Annotated[str, typer.Option("--profile", metavar="FILE", help="What compute and communication cost, in YAML.")]
DrawsOption = Annotated[
    int,
    typer.Option(
        "--draws",
        metavar="N",
        min=0,
        max=MAX_DRAWS,
        help=f"Simulate each so many times, {MIN_DRAWS} at least, with the profile's jitter; times are means. Default: once, "
        "without.",
    ),
]
ModulesOption = Annotated[str, typer.Option("--modules", metavar="N|TABLE.json", help="How many modules, or a module table.")]


def simulate_command(
    schedules: Schedules,
    profile: ProfileOption,
    modules: ModulesOption,
    settings: inputs.SetOption = None,
    num_draws: DrawsOption = 0,
    output: Annotated[Format, typer.Option("--format", help="For a person or for a program.")] = Format.TEXT,
) -> None:
    """Run schedules against a cost model: time of a backward, what is exposed and why, communication memory.

    Several are compared, the fastest first; of one the exposed collectives are told. JSON has every op and the curve of memory.

    Exit codes: 0 printed; 1 a schedule has errors, or deadlocks; 2 wrong usage or an unreadable file.
    """
    job = read_job(schedules, read_profile(profile), read_table(modules), settings or [])
    drawn = _drawn(job, num_draws)
    if output is Format.JSON:
        data = [{**_as_data(one), **_draws_as_data(drawn.get(one.plan.digest))} for one in job.simulated]
        typer.echo(json.dumps(data, indent=2, allow_nan=False))
    elif len(job.simulated) == 1:
        typer.echo(str(describe_backward(report(job.simulated[0]))))
        for one in drawn.values():
            typer.echo(f"with jitter: {_ms(one.mean_s)} in the mean of {num_draws} draws, nine of ten within {_ms(one.most_s)}")
    else:
        typer.echo("\n".join(_comparison(job, drawn)))


def compare(
    schedules: Schedules,
    profile: ProfileOption,
    modules: ModulesOption,
    settings: inputs.SetOption = None,
    num_draws: DrawsOption = 0,
    columns: Annotated[
        int | None, typer.Option(min=20, max=1000, help="Width of the timelines. Default: that of the terminal.")
    ] = None,
) -> None:
    """Run schedules against a cost model, and print a table and a timeline of each, all to one scale.

    Exit codes: as those of `simulate`.
    """
    job = read_job(schedules, read_profile(profile), read_table(modules), settings or [])
    width = columns or min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    drawn = _drawn(job, num_draws)
    head = ["timelines without jitter", ""] if drawn else []
    typer.echo("\n".join([*_comparison(job, drawn), "", *head, *draw(_in_order(job, drawn), width)]))


def trace_command(
    inputs_: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Runs that `attachment.save_run` wrote; or schedules, to be simulated."),
    ],
    profile: Annotated[str | None, typer.Option("--profile", metavar="FILE", help="Of schedules: as for `simulate`.")] = None,
    modules: Annotated[str | None, typer.Option("--modules", metavar="N|TABLE.json", help="The same.")] = None,
    settings: inputs.SetOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = Path("trace.json"),
) -> None:
    """Write a trace that opens in Perfetto (ui.perfetto.dev) and chrome://tracing, of measured or of simulated backwards.

    Each rank or schedule is a process with a track for compute and one for each lane; arrows are dependencies, counters memory.
    Runs of several ranks go into one file, laid beside each other by their wall clocks.

    Exit codes: as those of `simulate`.
    """
    runs = [path for path in inputs_ if path.endswith(".json")]
    if runs and len(runs) < len(inputs_):
        raise typer.BadParameter(
            "runs and schedules can't share a trace: one is measured, the other is not", param_hint="INPUT"
        )
    if runs:
        shown = processes([read_run(path) for path in runs])
    elif profile is None or modules is None:
        raise typer.BadParameter("schedules are simulated, which needs --profile and --modules", param_hint="INPUT")
    else:
        job = read_job(inputs_, read_profile(profile), read_table(modules), settings or [])
        shown = [process(one) for one in job.simulated]
    text = json.dumps(trace(shown))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {output}: {error.strerror}", param_hint="--output") from error
    typer.echo(f"{output}: {len(shown)} backward(s), {len(text) / 1e6:.1f} MB", err=True)


def read_run(path: str) -> Run:
    """A run that `attachment.save_run` wrote.

    Raises:
        typer.BadParameter: it can't be read, or is no run.
    """
    try:
        return Run.from_json(load_text(path, MAX_RUN_BYTES, "a run"), path)
    except CommplanError as error:
        raise typer.BadParameter(str(error), param_hint="INPUT") from error


@dataclass(frozen=True)
class Job:
    """What was asked for: schedules as they would run, under a profile, for modules."""

    simulated: Sequence[Simulated]
    profile: Profile
    modules: ModuleTable

    @property
    def fastest_first(self) -> Sequence[Simulated]:
        """By the time of a backward."""
        return sorted(self.simulated, key=lambda one: one.duration_s)


def read_job(schedules: Sequence[str], profile: Profile, module_table: ModuleTable, settings: Sequence[str]) -> Job:
    """Schedules, compiled for some modules and simulated.

    Raises:
        typer.BadParameter: a param is set that none of them has, or the profile does not say what something costs.
        typer.Exit: a schedule has errors, can't be read, or deadlocks; they went to standard error.
    """
    inputs.require_one_stdin(schedules)
    chosen = inputs.read_settings(settings)
    read = [inputs.read_schedule(name) for name in dict.fromkeys(schedules)]
    specs = [spec for _, spec in read if spec is not None]
    if len(specs) == len(read):
        inputs.require_declared(chosen, (param.name for spec in specs for param in spec.params))
    reports = [found for found, spec in read if spec is None]
    plans: list[Plan] = []
    for found, spec in read:
        if spec is None:
            continue
        own = {name: value for name, value in chosen.items() if name in {param.name for param in spec.params}}
        try:
            with inputs.usage_errors():
                plans.append(compiler.compile(spec, module_table, **own))
        except ScheduleError as error:
            reports.append(FileReport(found.file, error.violations))
    if reports:
        render.console(stderr=True).print(render.report_text(reports), end="")
        raise typer.Exit(EXIT_UNUSABLE if any(found.problem for found in reports) else EXIT_ERRORS)
    simulated = [simulated_under(plan, profile) for plan in plans]
    return Job(simulated, profile, module_table)


def read_table(modules: str) -> ModuleTable:
    """`--modules`; raises as `inputs.read_modules` does."""
    return compiler.module_table(inputs.read_modules(modules))


def read_profile(path: str) -> Profile:
    """`--profile`.

    Raises:
        typer.BadParameter: it can't be read, or is no profile.
    """
    try:
        return load_profile(path)
    except CommplanError as error:
        raise typer.BadParameter(str(error), param_hint="--profile") from error


def simulated_under(plan: Plan, profile: Profile) -> Simulated:
    """One backward of `plan`; raises as `read_job` does."""
    try:
        return simulate(plan, costs(plan, profile))
    except DeadlockError as error:
        typer.echo(f"error: {plan.schedule}: {error}", err=True)
        raise typer.Exit(EXIT_ERRORS) from error
    except CommplanError as error:
        raise typer.BadParameter(str(error), param_hint="--profile") from error


def _drawn(job: Job, num: int) -> Mapping[str, Draws]:
    """Each schedule under `num` draws of its costs, by the digest of its plan; nothing where `num` is 0.

    Raises:
        typer.BadParameter: the profile says nothing that could be drawn, or so few draws tell nothing.
    """
    if num == 0:
        return {}
    if num < MIN_DRAWS:
        raise typer.BadParameter(
            f"{num} draws tell little, and nothing of nine of ten: ask for {MIN_DRAWS} or more", param_hint="--draws"
        )
    if not job.profile.has_jitter:
        raise typer.BadParameter(
            f"the profile {job.profile.name!r} does not say how much anything differs from one time to the next: add "
            "compute_s.jitter, or jitter to its links",
            param_hint="--draws",
        )
    return {one.plan.digest: draws(one.plan, costs(one.plan, job.profile), num) for one in job.simulated}


def _comparison(job: Job, drawn: Mapping[str, Draws]) -> Iterator[str]:
    """A table, the fastest first."""
    alone_s = sum(compute_alone(job.simulated[0].plan, job.profile))
    lanes = list(dict.fromkeys(lane for one in job.simulated for lane in report(one).lanes))
    rows = []
    for one in _in_order(job, drawn):
        of_draws = drawn.get(one.plan.digest)
        simulated = [one] if of_draws is None else of_draws.simulated
        told = [report(each) for each in simulated]
        duration_s = fmean(each.duration_s for each in simulated)
        ratio = f"{duration_s / alone_s:.3f}" if alone_s else "-"
        exposed = [_ms(fmean(each.exposed_s(lane) for each in told)) for lane in lanes]
        most = [_ms(of_draws.most_s)] if of_draws is not None else []
        row = (one.plan.schedule, _ms(duration_s), *most, ratio, *exposed, f"{told[0].peak_bytes / 2**20:.1f} MiB")
        rows.append(row)
    within = ["nine of ten within"] if drawn else []
    head = ("schedule", "backward", *within, "of compute", *(f"exposed, {lane}" for lane in lanes), "peak")
    means = "".join(f"; means of {len(one.simulated)} draws" for one in list(drawn.values())[:1])
    yield f"{len(job.modules)} modules, profile {job.profile.name}; compute alone {_ms(alone_s)}{means}"
    yield ""
    yield from table(head, rows, texts=("schedule",))


def _in_order(job: Job, drawn: Mapping[str, Draws]) -> Sequence[Simulated]:
    """The fastest first, by the means of draws if there were any."""
    found = job.fastest_first
    return sorted(found, key=lambda one: drawn[one.plan.digest].mean_s) if drawn else found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _draws_as_data(drawn: Draws | None) -> Mapping[str, Any]:
    """What draws of the costs made of a backward, if there were any."""
    if drawn is None:
        return {}
    told = [report(one) for one in drawn.simulated]
    return {
        "draws": {
            "num": len(told),
            "backward_s": drawn.mean_s,
            "nine_of_ten_s": drawn.most_s,
            "compute_wait_s": fmean(one.compute_wait_s() for one in told),
        }
    }


def _as_data(simulated: Simulated) -> Mapping[str, Any]:
    """Everything about one backward; seconds from its begin, and bytes."""
    told = describe_backward(report(simulated)).to_dict()
    return {
        "schedule": simulated.plan.schedule,
        "params": dict(simulated.plan.params),
        "digest": simulated.plan.digest,
        "backward_s": simulated.duration_s,
        "compute_wait_s": told["compute_wait_s"],
        "peak_bytes": told["peak_bytes"],
        "lanes": [{k: v for k, v in lane.items() if k != "peers_s"} for lane in told["lanes"]],
        "ops": [
            {
                "op": str(ran.op),
                "lane": ran.lane,
                "issued_s": ran.issued_s,
                "begin_s": ran.begin_s,
                "end_s": ran.end_s,
                "began_after": limit,
            }
            for ran, limit in zip(simulated.ops, limits(simulated), strict=True)
        ],
        "exposed": [
            {"op": op["op"], "exposed_s": op["exposed_s"], "reasons": op["reasons"]}
            for op in told["ops"]
            if op["exposed_s"] > 0
        ],
        "compute": [{"module": ran.module, "begin_s": ran.begin_s, "end_s": ran.end_s} for ran in simulated.compute],
        "waits": [
            {"step": stood.number, "module": stood.module, "begin_s": stood.begin_s, "end_s": stood.end_s}
            for stood in simulated.waits
        ],
        "memory": [{"begin_s": point.begin_s, "size_bytes": point.size_bytes} for point in memory(simulated)],
    }
