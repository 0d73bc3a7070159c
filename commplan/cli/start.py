"""`commplan new` and `commplan schema`: what somebody who writes a schedule begins with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Final

import typer

from commplan.cli import EXIT_UNUSABLE, inputs, render
from commplan.cli.render import FileReport
from commplan.errors import Span
from commplan.language import examine, library
from commplan.language.nodes import Scalar
from commplan.language.source import shown
from commplan.language.spec import ScheduleSpec

EXIT_ERRORS: Final = 1

SCHEMA_FILE: Final = "schedule.schema.json"
MODELINE: Final = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")

STARTER: Final = """\
# A schedule for commplan: when the gradients of each module are reduced and applied. It cannot change what is computed.
#   commplan check {name}.yaml                 every mistake, with its place
#   commplan plan {name}.yaml --modules 4      what runs when, and what waits for what
#   commplan explain                           the rules
version: 1
name: {name}
summary: Say what it does, when to use it and what it costs.

# In each hook `n` is the module that it opens for: 0 is the first whose gradients are complete, <n-1> the one before n.
# What names a module that is not there vanishes, and what is left after the last hook runs in root.

# Integers that a run can set: `commplan check {name}.yaml --set k=3`.
# params:
#   k: {{default: 2, min: 1, max: 8}}        # used as AR_<n-k>

# Queues beside the built-in ones: compute, shard and replicate.
# lanes:
#   outer: {{priority: high}}                # used as `AR_n: {{after: RS_n, lane: outer}}`

# Opens for each module when its gradients are complete.
post_backward:
  - wait: RS_<n-1>                         # compute waits: one input of a reduce-scatter in memory at a time
  - RS_n: {{after: compute_n}}               # reduce-scatter over the shard axis
  - AR_n: {{after: RS_n}}                    # all-reduce over the replicate axis; AR_<n-1> would do it one module later

# Opens once, after the last module. A line with _n stands for every module in order.
root:
  - apply_n: {{after: AR_n}}                 # write to .grad; earlier, in a hook of its own, to need less memory
"""


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the schedule is called; its file is NAME.yaml.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="SCHEDULE", help="Begin with a copy of this file, or of this schedule of the library."),
    ] = None,
) -> None:
    """Write NAME.yaml here: a commented schedule to start from. No file is overwritten.

    Where schedule.schema.json lies here (see `commplan schema`), the first line names it to editors.

    Exit codes: 0 written; 1 the schedule to copy has errors (they go to standard error); 2 wrong usage, an unreadable file,
    or NAME.yaml exists.
    """
    name = checked_name(name)
    text = STARTER.format(name=name) if source is None else _copy(source, name)
    if Path(SCHEMA_FILE).is_file() and MODELINE not in text:
        text = MODELINE + text
    path = written(name, text)
    typer.echo(f"wrote {path}; next: commplan check {path}")


def written(name: str, text: str) -> Path:
    """The new file NAME.yaml, which holds `text`.

    Raises:
        typer.BadParameter: there is one; it was left as it is.
    """
    path = Path(f"{name}.yaml")
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError as error:
        raise typer.BadParameter(f"{path} exists already; it was left as it is") from error
    return path


def checked_name(name: str) -> str:
    """The name of a new schedule, without `.yaml`.

    Raises:
        typer.BadParameter: no schedule may have it.
    """
    name = name.removesuffix(".yaml")
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(f"a name has letters, digits, - and _, a letter first, not {shown(name)}")
    if not Scalar(Span("", 1, 1), name).is_text:
        raise typer.BadParameter(f"{name} is no text in YAML; choose another name")
    if name in library.names():
        raise typer.BadParameter(f"the library has a schedule {name}; choose another name, and `--from {name}` to copy it")
    return name


def _copy(source: str, name: str) -> str:
    """The text of another schedule under a new name."""
    report, spec = inputs.read_schedule(source)
    if spec is None:
        render.console(stderr=True).print(render.report_text([report]), end="")
        raise typer.Exit(EXIT_UNUSABLE if report.problem else EXIT_ERRORS)
    text = f"# Begun as a copy of {render.visible(spec.name)}.\n" + _renamed(spec, name)
    made = examine(text, f"{name}.yaml")[0]
    if made is None or made.name != name:
        problem = f"{spec.file}: its name is written so that it cannot be replaced; write it on one line"
        render.console(stderr=True).print(render.report_text([FileReport(spec.file, problem=problem)]), end="")
        raise typer.Exit(EXIT_UNUSABLE)
    return text


def _renamed(spec: ScheduleSpec, name: str) -> str:
    """The text of a schedule, with another word where its name stands."""
    span = spec.name_span
    lines = spec.text.split("\n")
    line = lines[span.line - 1]
    lines[span.line - 1] = line[: span.column - 1] + name + line[span.column - 1 + span.length :]
    return "\n".join(lines)


def schema() -> None:
    """Print the JSON Schema of schedules, by which an editor completes keys and marks wrong ones.

    As in `commplan schema > schedule.schema.json`, and `# yaml-language-server: $schema=schedule.schema.json` as the first
    line of a schedule.
    """
    from commplan.language.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
