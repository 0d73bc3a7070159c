"""`commplan diff`: what differs between two schedules, or plans that were saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from commplan import compiler
from commplan.cli import EXIT_UNUSABLE, inputs, render
from commplan.cli.render import FileReport
from commplan.errors import CommplanError, PlanError, ScheduleError
from commplan.language import library
from commplan.language.modules import ModuleTable
from commplan.language.source import read_bytes
from commplan.language.spec import ScheduleSpec
from commplan.plan import Plan

EXIT_DIFFERENT: Final = 1
MAX_PLAN_BYTES: Final = 1 << 28
MAX_PROBLEMS: Final = 3
"""So many faults of a saved plan are shown."""


class Format(StrEnum):
    """How `diff` prints."""

    TEXT = "text"
    JSON = "json"


SIDE: Final = (
    "A schedule file, the name of one of the library, or a plan saved with `commplan plan --json`; - for standard input."
)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    after: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    modules: Annotated[
        str | None,
        typer.Option(metavar="N|TABLE.json", help="How many modules, or a module table. Default: those of a saved plan."),
    ] = None,
    settings: inputs.SetOption = None,
    output: Annotated[Format, typer.Option("--format", help="For a person or for a program.")] = Format.TEXT,
) -> None:
    """Compare two plans: what moved, what waits changed, and communication memory, hook by hook.

    Schedules are compiled first, for the same modules. A param that is set applies to those that declare it. To compare one
    schedule under two settings, save a plan of one. Names of schedules are not compared.

    Exit codes: 0 no difference; 1 some; 2 wrong usage, an unreadable file or a schedule with errors.
    """
    inputs.require_one_stdin([before, after])
    sides = [_read(name) for name in (before, after)]
    reports = [side for side in sides if isinstance(side, FileReport)]
    specs = [side for side in sides if isinstance(side, ScheduleSpec)]
    chosen = inputs.read_settings(settings or [])
    if len(specs) + len(reports) == 0 and modules is not None:
        raise typer.BadParameter("both are saved plans, which have their modules", param_hint="--modules")
    if not reports:
        inputs.require_declared(chosen, (param.name for spec in specs for param in spec.params))
    table = _table(modules, [side for side in sides if isinstance(side, Plan)])
    if table is None and not reports:
        raise typer.BadParameter("say for how many modules, as in --modules 4, or name a module table", param_hint="--modules")
    plans: list[Plan] = []
    for side in sides:
        made = _compiled(side, table, chosen) if isinstance(side, ScheduleSpec) and table is not None else side
        if isinstance(made, Plan):
            plans.append(made)
        elif isinstance(made, FileReport) and made not in reports:
            reports.append(made)
    if reports:
        render.console(stderr=True).print(render.report_text(reports), end="")
        raise typer.Exit(EXIT_UNUSABLE)
    _print(plans[0], plans[1], output)


def _print(before: Plan, after: Plan, output: Format) -> None:
    from commplan.cli.difference import difference_json, difference_text
    from commplan.plan.diff import diff as difference

    found = difference(before, after)
    if output is Format.JSON:
        typer.echo(json.dumps(difference_json(found), indent=2))
    else:
        render.console().print(difference_text(found), end="")
    raise typer.Exit(0 if found.equal else EXIT_DIFFERENT)


def _read(name: str) -> ScheduleSpec | Plan | FileReport:
    """What `name` means, or why it means nothing."""
    if name == inputs.STDIN:
        data = inputs.read_stdin(MAX_PLAN_BYTES)
        if inputs.is_saved(data):
            return _plan(data, inputs.STDIN_FILE)
        report, spec = inputs.parse_schedule(data, inputs.STDIN_FILE)
    elif name not in library.names() and (name.endswith(".json") or inputs.is_saved_file(name)):
        try:
            return _plan(read_bytes(Path(name), MAX_PLAN_BYTES), name)
        except CommplanError as error:
            return FileReport(name, problem=str(error))
    else:
        report, spec = inputs.read_schedule(name)
    return report if spec is None else spec


def _plan(data: bytes, file: str) -> Plan | FileReport:
    """The plan in some bytes, or what is wrong with it."""
    try:
        return Plan.from_json(data.decode("utf-8"))
    except PlanError as error:
        more = len(error.problems) - MAX_PROBLEMS
        shown = [*error.problems[:MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        return FileReport(file, problem=f"{file} is no valid plan: {'; '.join(shown)}")
    except UnicodeDecodeError:
        return FileReport(file, problem=f"{file} is no valid plan: it is not UTF-8")


def _table(modules: str | None, saved: list[Plan]) -> int | ModuleTable | None:
    """The modules to compile schedules for: those asked for, or of the saved plan."""
    if modules is not None:
        return inputs.read_modules(modules)
    return saved[0].modules if saved else None


def _compiled(spec: ScheduleSpec, table: int | ModuleTable, chosen: Mapping[str, int]) -> Plan | FileReport:
    declared = {param.name for param in spec.params}
    params = {name: value for name, value in chosen.items() if name in declared}
    try:
        with inputs.usage_errors():
            return compiler.compile(spec, table, **params)
    except ScheduleError as error:
        return FileReport(spec.file, error.violations)
