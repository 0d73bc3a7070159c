"""The schedules that come with commplan, and what a user may pass as a schedule."""

from __future__ import annotations

from pathlib import Path

from commplan.errors import CommplanError
from commplan.language.parsing import load, parse
from commplan.language.source import did_you_mean, shown
from commplan.language.spec import ScheduleSpec


def folder() -> Path:
    """Where the library lies: in an installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "schedules"
    return installed if installed.is_dir() else package.parent / "schedules"


def names() -> tuple[str, ...]:
    """The names of the library's schedules, sorted."""
    return tuple(sorted(path.stem for path in folder().glob("*.yaml")))


def find(name: str) -> Path:
    """The file of a schedule of the library.

    Raises:
        CommplanError: if the library has no schedule of this name.
    """
    if name not in names():
        raise CommplanError(f"the library has no schedule {shown(name)}; {did_you_mean(name, names())}")
    return folder() / f"{name}.yaml"


def resolve(schedule: str | Path | ScheduleSpec) -> ScheduleSpec:
    """The schedule that is meant: a name of the library, a path, or YAML text (a string of more than one line).

    Raises:
        ScheduleError: with every violation of CP0xx in it.
        CommplanError: if there is no such schedule, or its file cannot be read.
    """
    if isinstance(schedule, ScheduleSpec):
        return schedule
    if isinstance(schedule, Path):
        return load(schedule)
    if not isinstance(schedule, str):
        raise CommplanError(f"a schedule is a name of the library, a path or YAML text, not {type(schedule).__name__}")
    if "\n" in schedule:
        return parse(schedule)
    if schedule in names():
        return load(find(schedule))
    if "/" in schedule or schedule.endswith((".yaml", ".yml")) or _exists(schedule):
        return load(schedule)
    raise CommplanError(f"no schedule {shown(schedule)}, in the library or as a file; {did_you_mean(schedule, names())}")


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # longer than a name may be, or with a NUL character
        return False
