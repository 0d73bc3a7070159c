"""What a user passes to options, turned into what the compiler takes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from commplan import compiler
from commplan.cli.render import FileReport
from commplan.errors import CommplanError, ScheduleError, Violation
from commplan.language import library, load_table, parse, resolve
from commplan.language.fields import UNIT_BYTES, size_bytes
from commplan.language.modules import ModuleTable
from commplan.language.source import MAX_FILE_BYTES, decode, did_you_mean, read_bytes, shown
from commplan.language.spec import OpLine, ScheduleSpec
from commplan.ops import Section

MAX_NUM_MODULES: Final = 100_000
STDIN: Final = "-"
STDIN_FILE: Final = "<stdin>"

_SAVED: Final = re.compile(rb'\s*\{\s*"format"')
_HEAD_BYTES: Final = 100

SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=INTEGER", help="Set a param; may be repeated.")]


def read_modules(value: str) -> int | ModuleTable:
    """`--modules`: how many modules, or the path of a module table in JSON.

    Raises:
        typer.BadParameter: if it is neither, or the table cannot be used.
    """
    if re.fullmatch(r"[+-]?\d+", value, re.ASCII):
        # int() refuses thousands of digits with an exception of its own
        count = int(value) if len(value) < 10 else MAX_NUM_MODULES + 1
        if not 1 <= count <= MAX_NUM_MODULES:
            raise typer.BadParameter(
                f"expected 1 to {MAX_NUM_MODULES} modules, not {shown(value)[1:-1]}", param_hint="--modules"
            )
        return count
    try:
        return load_table(value)
    except CommplanError as error:
        raise typer.BadParameter(f"expected a number of modules or a module table; {error}", param_hint="--modules") from error


@dataclass(frozen=True, slots=True)
class Against:
    """What schedules are checked against: a module table, one for each rank, or (none) every number of modules."""

    tables: tuple[int | ModuleTable, ...] = ()
    memory_cap_bytes: int | None = None
    in_flight: int = 1

    def findings(self, spec: ScheduleSpec, params: Mapping[str, int]) -> tuple[Violation, ...]:
        """Every finding in a schedule."""
        cap_bytes = self.memory_cap_bytes
        if len(self.tables) > 1:
            return compiler.check_ranks(spec, self.tables, params, in_flight=self.in_flight, memory_cap_bytes=cap_bytes)
        modules = self.tables[0] if self.tables else None
        return compiler.check(spec, modules, params, memory_cap_bytes=cap_bytes)

    def assumption(self, spec: ScheduleSpec) -> str:
        """What findings hold for, where sizes of modules matter and none are given; "" where none do."""
        lines = [line for section in Section for line in spec.lines(section) if isinstance(line, OpLine)]
        by_size = any(line.fuse is not None and line.fuse.size_bytes is not None for line in lines)
        if not by_size or any(isinstance(table, ModuleTable) for table in self.tables):
            return ""
        (module,) = ModuleTable.uniform(1).modules
        usual = f"{module.gathered_bytes >> 20} MiB"
        return f"buckets of `bytes` were checked for modules of {usual} each; --modules TABLE.json checks them for yours"


def read_against(modules: Sequence[str], memory_cap: str | None, in_flight: int) -> Against:
    """`--modules`, given any number of times, `--memory-cap` and `--in-flight`.

    Raises:
        typer.BadParameter: if one cannot be used, or there is a cap and no `--modules`, or a bound and no several ranks.
    """
    if in_flight > 1 and len(modules) < 2:
        raise typer.BadParameter("it is about ranks: give --modules once for each", param_hint="--in-flight")
    if memory_cap is not None and not modules:
        raise typer.BadParameter("it needs --modules: the memory of which model?", param_hint="--memory-cap")
    cap_bytes = None if memory_cap is None else read_memory_cap(memory_cap)
    return Against(tuple(map(read_modules, modules)), cap_bytes, in_flight)


def read_memory_cap(value: str) -> int:
    """`--memory-cap`: `2GiB`, `2GB` or a number of bytes.

    Raises:
        typer.BadParameter: if it is no size.
    """
    cap_bytes = size_bytes(value.strip())
    if not cap_bytes:
        units = ", ".join(UNIT_BYTES)
        raise typer.BadParameter(f"expected a size above 0 as in 2GiB ({units}), not {shown(value)}", param_hint="--memory-cap")
    return cap_bytes


def read_settings(values: Sequence[str]) -> dict[str, int]:
    """`--set k=3`, given any number of times.

    Raises:
        typer.BadParameter: if one is not NAME=INTEGER, or a name is set twice.
    """
    settings: dict[str, int] = {}
    for value in values:
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([+-]?\d{1,9})\s*", value, re.ASCII)
        if match is None:
            raise typer.BadParameter(f"expected NAME=INTEGER as in --set k=3, not {shown(value)}", param_hint="--set")
        if match[1] in settings:
            raise typer.BadParameter(f"{shown(match[1])} is set twice", param_hint="--set")
        settings[match[1]] = int(match[2])
    return settings


def require_declared(settings: Mapping[str, int], declared: Iterable[str]) -> None:
    """Check that each param that is set is one that some schedule declares.

    Raises:
        typer.BadParameter: naming the first that is not.
    """
    known = set(declared)
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or "there are none"
            raise typer.BadParameter(f"no schedule here has a param {shown(name)}; {hint}", param_hint="--set")


def require_one_stdin(names: Sequence[str]) -> None:
    """Check that at most one of some files is standard input, which can be read once.

    Raises:
        typer.BadParameter: if several are.
    """
    if names.count(STDIN) > 1:
        raise typer.BadParameter("only one file can be -, which is standard input")


def read_stdin(limit_bytes: int) -> bytes:
    """The first `limit_bytes` bytes of standard input, and one more where there are more."""
    return b"" if sys.stdin is None else sys.stdin.buffer.read(limit_bytes + 1)


def read_schedule(name: str) -> tuple[FileReport, ScheduleSpec | None]:
    """The schedule that `name` means (`-`: standard input), and a report that says why where there is none."""
    if name == STDIN:
        return parse_schedule(read_stdin(MAX_FILE_BYTES), STDIN_FILE)
    try:
        spec = resolve(name)
    except ScheduleError as error:
        if name not in library.names() and is_saved_file(name):
            return _no_schedule(name), None
        return FileReport(error.violations[0].span.file, error.violations), None
    except CommplanError as error:
        return FileReport(name, problem=str(error)), None
    return FileReport(spec.file), spec


def parse_schedule(data: bytes, file: str) -> tuple[FileReport, ScheduleSpec | None]:
    """The schedule in some bytes, and a report that says why where there is none."""
    if is_saved(data):
        return _no_schedule(file), None
    text, unreadable = decode(data, file)
    if unreadable is not None:
        return FileReport(file, (unreadable,)), None
    try:
        return FileReport(file), parse(text, file)
    except ScheduleError as error:
        return FileReport(file, error.violations), None


def is_saved(data: bytes) -> bool:
    """Whether a file that begins with `data` is a plan that was saved, or would be one."""
    return _SAVED.match(data) is not None


def is_saved_file(name: str) -> bool:
    """Whether a file is a plan that was saved, by how it begins."""
    try:
        return is_saved(read_bytes(Path(name), _HEAD_BYTES))
    except CommplanError:
        return False


def _no_schedule(file: str) -> FileReport:
    return FileReport(file, problem=f"{file} is a saved plan, not a schedule; `commplan diff` reads plans")


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns what a user asked for wrongly, a param out of its bounds, into an error of usage."""
    try:
        yield
    except ScheduleError:
        raise
    except CommplanError as error:
        raise typer.BadParameter(str(error)) from error
