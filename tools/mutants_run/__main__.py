"""Try the checker on mutants of every schedule: `python -m mutants_run`, or `tools/mutants`.

An operator makes mutants of a schedule, of its plans, and of the memory that these declare; an independent oracle tells which
are wrong (of declared memory: all). Exit status 1 where a wrong one is accepted or a right one refused; warnings are no
refusals.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from commplan.language import library
from mutants_run.trial import Result, Row, meaning, try_schedule

REPOSITORY = Path(__file__).resolve().parents[2]
HEAD = f"{'':<34}{'mutants':>9}{'wrong':>9}{'refused':>9}{'wrong but accepted':>20}{'wrongly refused':>17}"


def main(arguments: list[str] | None = None) -> int:
    """Try everything; the exit status."""
    paths = [library.find(name) for name in library.names()]
    paths += sorted((REPOSITORY / "tests" / "cases" / "ok").glob("*.yaml"))
    parser = argparse.ArgumentParser(prog="tools/mutants", description=__doc__)
    parser.add_argument(
        "schedules",
        nargs="*",
        help="names of some schedules (default: the library and tests/cases/ok, of those that say the same one)",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.schedules) - {path.stem for path in paths})
    if unknown:
        parser.error(f"no schedule {', '.join(unknown)}; there are {', '.join(path.stem for path in paths)}")
    chosen = [path for path in paths if path.stem in options.schedules] if options.schedules else distinct(paths)
    result = _try_all(chosen, max(1, options.jobs))
    print("\n".join(table_lines(result)))
    for told in result.disagreements:
        print(f"\n{told}")
    return 1 if result.disagreements else 0


def distinct(paths: Iterable[Path]) -> list[Path]:
    """The first of the schedules that say the same, whatever they are called and however they are written."""
    first: dict[str, Path] = {}
    for path in paths:
        first.setdefault(meaning(path), path)
    return list(first.values())


def _try_all(paths: list[Path], jobs: int) -> Result:
    result = Result()
    if jobs == 1 or len(paths) == 1:
        for path in paths:
            result.add(try_schedule(path))
        return result
    with ProcessPoolExecutor(jobs) as pool:
        longest_first = sorted(paths, key=lambda path: -path.stat().st_size)
        waiting = {pool.submit(try_schedule, path): path for path in longest_first}
        for number, done in enumerate(as_completed(waiting), 1):
            found = done.result()
            result.add(found)
            if sys.stderr.isatty():
                print(f"{number}/{len(paths)} {waiting[done].stem}", file=sys.stderr)
    result.disagreements.sort()
    return result


def table_lines(result: Result) -> list[str]:
    """The table: a row for each operator and form, and their sum."""
    lines = [HEAD]
    for form in ("YAML", "plan", "buffers"):
        rows = {operator: row for (which, operator), row in result.rows.items() if which == form and operator != "none"}
        lines += [_row(f"{form}: {operator}", row) for operator, row in rows.items()]
        lines.append(_row(f"{form}: all", _sum(rows.values())))
    return lines


def _sum(rows: Iterable[Row]) -> Row:
    total = Row()
    for row in rows:
        total.add(row)
    return total


def _row(name: str, row: Row) -> str:
    numbers = f"{row.mutants:>9}{row.wrong:>9}{row.refused:>9}{row.missed:>20}{row.wrongly_refused:>17}"
    return f"{name:<34}{numbers}"


if __name__ == "__main__":
    sys.exit(main())
