"""The subcommands.  Each reads its inputs, calls one stage and prints; exit codes are described in the package."""

from __future__ import annotations

import textwrap
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

import commplan
from commplan import compiler
from commplan.cli import (
    EXIT_UNUSABLE,
    bench,
    calibration,
    compare,
    estimating,
    formats,
    inputs,
    predict,
    render,
    reporting,
    start,
    tuning,
)
from commplan.cli.formats import Format
from commplan.cli.render import FileReport
from commplan.errors import Rule, ScheduleError, Severity
from commplan.language import library, load
from commplan.language.source import did_you_mean, shown
from commplan.language.spec import ScheduleSpec

EXIT_ERRORS: Final = 1
MAX_TEXT_COLUMNS: Final = 100

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"commplan {commplan.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Write, check and inspect schedules for the gradient communication of an HSDP backward."""


@app.command("list")
def list_library() -> None:
    """List the schedules of the library, and what each is for."""
    console = render.console()
    columns = _columns(console)
    for name in library.names():
        summary = load(library.find(name)).summary
        console.print(Text(name, "bold"))
        console.print(Text(textwrap.fill(summary, columns, initial_indent="    ", subsequent_indent="    ")))


@app.command()
def check(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Schedule files, or names of the library's; - for standard input.")
    ],
    modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N|TABLE.json",
            help="How many modules, or a module table. Default: every number that matters. Several: one for each rank.",
        ),
    ] = None,
    settings: inputs.SetOption = None,
    memory_cap: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The most communication memory on one rank, as 2GiB; needs --modules."),
    ] = None,
    in_flight: Annotated[
        int, typer.Option(metavar="K", min=1, help="Between ranks: how many collectives can surely be in flight at once.")
    ] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on warnings too.")] = False,
    output: Annotated[
        Format, typer.Option("--format", help="For a person, a program, code scanning or GitHub Actions.")
    ] = Format.TEXT,
) -> None:
    """Check schedules: every mistake at once, each with its place.

    A param that is set applies to those of the files that declare it.

    Exit codes: 0 no errors; 1 errors (with --strict: warnings too); 2 wrong usage or an unreadable file.
    """
    inputs.require_one_stdin(files)
    against = inputs.read_against(modules or [], memory_cap, in_flight)
    chosen = inputs.read_settings(settings or [])
    results = [_check_file(name, against, chosen) for name in files]
    specs = [spec for report, spec in results if spec is not None]
    if len(specs) == len(results):
        inputs.require_declared(chosen, (param.name for spec in specs for param in spec.params))
    reports = [report for report, spec in results]
    if output is Format.TEXT:
        render.console().print(render.report_text(reports), end="")
    else:
        typer.echo(formats.WRITERS[output](reports))
    raise typer.Exit(_exit_code(reports, strict))


@app.command()
def plan(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A schedule file, or the name of one of the library; - for standard input.")
    ],
    modules: Annotated[str, typer.Option(metavar="N|TABLE.json", help="How many modules, or a module table.")],
    settings: inputs.SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, which Plan.from_json reads.")] = False,
) -> None:
    """Compile a schedule and print its plan: what runs in each hook, on which lane, and what it waits for.

    Exit codes: 0 printed; 1 the schedule has errors (they go to standard error); 2 wrong usage or an unreadable file.
    """
    table = inputs.read_modules(modules)
    chosen = inputs.read_settings(settings or [])
    report, spec = inputs.read_schedule(file)
    if spec is not None:
        inputs.require_declared(chosen, (param.name for param in spec.params))
        try:
            with inputs.usage_errors():
                compiled = compiler.compile(spec, table, **chosen)
        except ScheduleError as error:
            report = FileReport(report.file, error.violations)
        else:
            typer.echo(compiled.to_json() if as_json else compiled.text().rstrip("\n"))
            return
    render.console(stderr=True).print(render.report_text([report]), end="")
    raise typer.Exit(_exit_code([report], strict=False))


for command in (compare.diff, predict.compare, reporting.report, tuning.tune, start.new, start.schema):
    app.command()(command)
app.command("simulate")(predict.simulate_command)
app.command("trace")(predict.trace_command)
app.command("estimate")(estimating.estimate_command)

# What follows the script is the script's.
for command_of_job in (bench.bench, calibration.profile):
    app.command(context_settings={"allow_interspersed_args": False})(command_of_job)


@app.command()
def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="A rule's code, CP201. Without it: list all rules.")
    ] = None,
) -> None:
    """Explain a rule: what it asks for, why, a schedule that breaks it and one that does not."""
    console = render.console()
    if code is None:
        for rule in compiler.RULES.values():
            console.print(Text.assemble((rule.code, "bold"), f"  {rule.severity.value:<7}  {rule.title}"))
        return
    found = compiler.RULES.get(code.strip().upper())
    if found is None:
        hint = did_you_mean(code.upper(), compiler.RULES) if len(code) < 10 else "try without a code"
        raise typer.BadParameter(f"no rule has the code {shown(code)}; {hint}")
    console.print(_rule_text(found, _columns(console)), end="")


def _check_file(name: str, against: inputs.Against, chosen: dict[str, int]) -> tuple[FileReport, ScheduleSpec | None]:
    report, spec = inputs.read_schedule(name)
    if spec is None:
        return report, None
    declared = {param.name for param in spec.params}
    params = {key: value for key, value in chosen.items() if key in declared}
    with inputs.usage_errors():
        return FileReport(report.file, against.findings(spec, params), note=against.assumption(spec)), spec


def _exit_code(reports: list[FileReport], strict: bool) -> int:
    if any(report.problem for report in reports):
        return EXIT_UNUSABLE
    errors = sum(report.count(Severity.ERROR) for report in reports)
    warnings = sum(report.count(Severity.WARNING) for report in reports)
    return EXIT_ERRORS if errors or (strict and warnings) else 0


def _columns(console: Console) -> int:
    """How wide running text is."""
    return min(console.width, MAX_TEXT_COLUMNS)


def _rule_text(rule: Rule, columns: int) -> Text:
    out = Text.assemble((rule.code, "bold"), f" {rule.title} ({rule.severity.value})\n")
    for paragraph in (rule.what, rule.why):
        out.append("\n" + textwrap.fill(paragraph, columns) + "\n")
    for heading, schedule in (("Wrong:", rule.wrong), ("Right:", rule.right)):
        out.append(f"\n{heading}\n", "bold").append(textwrap.indent(schedule.strip("\n"), "    ") + "\n")
    return out
