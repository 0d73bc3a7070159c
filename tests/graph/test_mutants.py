"""Slips of all kinds in the schedules of the library: refused if and only if the interpreter shows them to be wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from commplan import compiler
from commplan.errors import ScheduleError, Severity
from commplan.language import bind_params, library, parse
from tests.oracle import Layout, is_right

SECTIONS = ("pre_backward", "post_backward", "root")
REF = re.compile(r"\b(RS|AR|apply|compute)_(n|<n[-+]\w+>)")
Lines = dict[str, list[str]]


def taken_apart(text: str) -> tuple[str, Lines]:
    """What stands before the sections, and the lines of each."""
    head, lines, section = "", {name: [] for name in SECTIONS}, ""
    for line in text.splitlines():
        bare = line.split(" #")[0].rstrip()
        section = next((name for name in SECTIONS if bare == f"{name}:"), section)
        if not section:
            head += line + "\n"
        elif bare.startswith("  - "):
            lines[section].append(bare)
    return head, lines


def put_together(head: str, lines: Lines) -> str:
    return head + "".join(f"{name}:\n" + "\n".join(found) + "\n" for name, found in lines.items() if found)


def shifted(match: re.Match[str], by: int) -> str:
    family, index = match.groups()
    if not re.fullmatch(r"n|<n[-+]\d+>", index):
        return match[0]
    offset = (0 if index == "n" else int(index[2:-1])) + by
    return f"{family}_n" if offset == 0 else f"{family}_<n{offset:+d}>"


def other_lines(section: str, line: str) -> Iterator[tuple[str, str]]:
    """Slips within one line."""
    for match in REF.finditer(line):
        for by in (-1, 1) if section != "root" else ():
            yield "shift an index", line[: match.start()] + shifted(match, by) + line[match.end() :]
        for family in ("RS", "AR", "apply"):
            if match.start() > line.index(":") > 0 and family != match[1]:
                yield "retarget", line[: match.start()] + f"{family}_{match[2]}" + line[match.end() :]
    if "after" in line:
        yield "drop an after", re.sub(r"after: [^,}]+(, )?", "", line)
    if "wait" not in line:
        bare = re.sub(r"(, )?lane: \w+", "", line)
        for lane in ("shard", "replicate", *(("compute",) if "apply" in line.split(":")[0] else ())):
            yield "change a lane", bare.replace("}", f", lane: {lane}}}").replace("{, ", "{")
        if "apply" not in line.split(":")[0]:
            for extra in ("fuse: {modules: 2}", "chunks: 2"):
                yield "fuse or split", line.replace("}", f", {extra}}}", 1)


def mutants(lines: Lines) -> Iterator[tuple[str, Lines]]:
    for section, found in lines.items():
        for place, line in enumerate(found):
            without = [*found[:place], *found[place + 1 :]]
            yield "drop a line", lines | {section: without}
            yield "double a line", lines | {section: [*found, line]}
            if place:
                yield "swap two lines", lines | {section: [*found[: place - 1], line, found[place - 1], *found[place + 1 :]]}
            for other in SECTIONS:
                if other != section:
                    moved = REF.sub(lambda match: f"{match[1]}_n", line) if other == "root" else line
                    yield "move to another hook", lines | {section: without, other: [*lines[other], moved]}
            for what, slip in other_lines(section, line):
                if slip != line:
                    yield what, lines | {section: [*found[:place], slip, *found[place + 1 :]]}


COUNTED = [name for name in library.names() if "bytes:" not in library.find(name).read_text(encoding="utf-8")]
"""Buckets of so many bytes depend on sizes, of which the oracle knows nothing."""


@pytest.mark.parametrize("name", COUNTED)
def test_every_wrong_slip_is_refused_and_no_right_one(name: str) -> None:
    head, lines = taken_apart(library.find(name).read_text())
    seen: Counter[tuple[str, bool]] = Counter()
    for what, changed in mutants(lines):
        text = put_together(head, changed)
        try:
            spec = parse(text)
        except ScheduleError:
            continue
        params = bind_params(spec, {})
        for num_modules in (1, 2, 4):
            right = is_right(Layout(spec, num_modules, params))
            found = [v for v in compiler.check(spec, num_modules, params) if v.severity is Severity.ERROR]
            assert right == (not found), f"{what}, {num_modules} modules, {[str(v) for v in found]}:\n{text}"
            seen[what, right] += 1
    assert {what for what, right in seen if not right} >= {"drop a line", "double a line", "shift an index"}
    assert any(right for _, right in seen)
