"""From the text of a schedule to a `ScheduleSpec`, or to everything that is wrong with the text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from commplan.errors import ScheduleError, Severity, Span, Violation, sort_violations
from commplan.language import nodes
from commplan.language.declarations import Declared, read_lanes, read_params
from commplan.language.fields import Entry, Scope, read_known, read_text, wrong_type
from commplan.language.lines import check_families, read_lines
from commplan.language.nodes import Node, Scalar, compose, describe
from commplan.language.source import MAX_FILE_BYTES, Findings, Source, check_text, decode, read_bytes, shown
from commplan.language.spec import LANGUAGE_VERSION, Line, OpLine, Param, ScheduleSpec
from commplan.language.uses import Use, uses
from commplan.ops import Section

SECTIONS: Final = tuple(section.value for section in Section)
KEYS: Final = ("version", "name", "summary", "params", "lanes", *SECTIONS)
MAX_NAME_CHARS: Final = 100
FORM: Final = "begin with a line `version: 1`; `commplan new NAME` writes a file to start from"


def parse(text: str, file: str = "<text>") -> ScheduleSpec:
    """The schedule that `text` spells; `file` names it in messages.

    Raises:
        ScheduleError: with every violation of CP0xx in the text.
    """
    spec, violations = examine(text, file)
    if spec is None:
        raise ScheduleError(violations)
    return spec


def load(path: str | Path) -> ScheduleSpec:
    """The schedule in a file.

    Raises:
        ScheduleError: with every violation of CP0xx in the file.
        CommplanError: if the file cannot be read.
    """
    text, unreadable = decode(read_bytes(Path(path), MAX_FILE_BYTES), str(path))
    if unreadable is not None:
        raise ScheduleError([unreadable])
    return parse(text, str(path))


def examine(text: str, file: str = "<text>") -> tuple[ScheduleSpec | None, tuple[Violation, ...]]:
    """The schedule that `text` spells, None where there are errors, and all violations: errors, or else warnings."""
    findings = Findings(Source.of(text, file))
    spec = _read(findings)
    if findings.violations or spec is None:
        return None, sort_violations(findings.violations)
    return spec, warnings(spec)


def warnings(spec: ScheduleSpec) -> tuple[Violation, ...]:
    """What is right but serves no purpose: params and lanes that no line uses."""
    lines = [line for section in Section for line in spec.lines(section)]
    used_params = {use.param for use in uses(lines)}
    used_lanes = {line.lane for line in lines if isinstance(line, OpLine)}
    unused = [("CP023", "param", p.name, p.span) for p in spec.params if p.name not in used_params]
    unused += [("CP027", "lane", lane.name, lane.span) for lane in spec.lanes if lane.name not in used_lanes]
    return sort_violations(
        Violation(code, f"no line uses the {what} {name}", span, "remove it", Severity.WARNING)
        for code, what, name, span in unused
    )


def _read(findings: Findings) -> ScheduleSpec | None:
    """The schedule in the findings' source; whatever it is, it is wrong where there are findings."""
    source = findings.source
    check_text(source, findings)
    root = compose(source, findings) if not findings.violations else None
    entries = read_known(root, "a schedule", KEYS, findings, FORM) if root is not None else None
    if root is None or entries is None:
        return None
    _check_version(entries, root, findings)
    name, name_span = _read_name(entries, root, findings)
    summary = read_text(entries["summary"].value, "`summary`", findings) if "summary" in entries else ""
    lanes = read_lanes(_value(entries, "lanes"), findings)
    params = read_params(_value(entries, "params"), frozenset(lanes), findings)
    scope = Scope(findings, frozenset(params), frozenset(lanes))
    sections = {section: read_lines(_value(entries, section), section, scope) for section in Section}
    lines = tuple(line for section in Section for line in sections[section])
    check_families(lines, scope)
    if not any(_has_items(_value(entries, section)) for section in Section):
        hint = "as in `post_backward:` with a line `- RS_n: {after: compute_n}` under it"
        findings.add("CP012", "the schedule has no line in `pre_backward`, `post_backward` or `root`", _head(root), hint)
    bounded = _bound(params, lines, findings)
    return ScheduleSpec(
        file=source.file,
        text=source.text,
        name=name,
        summary=summary or "",
        name_span=name_span,
        params=bounded,
        lanes=tuple(lane for lane in lanes.values() if lane is not None),
        pre_backward=sections[Section.PRE_BACKWARD],
        post_backward=sections[Section.POST_BACKWARD],
        root=sections[Section.ROOT],
    )


def _value(entries: Mapping[str, Entry], key: str) -> Node:
    """The value of a key that may be absent, or empty: then a mapping or list without entries."""
    node = entries[key].value if key in entries else None
    if node is not None and not (isinstance(node, Scalar) and node.is_null):
        return node
    nowhere = Span("", 1, 1)
    return nodes.Sequence(nowhere, ()) if key in SECTIONS else nodes.Mapping(nowhere, ())


def _has_items(node: Node) -> bool:
    """Whether a section has something in it; one of a wrong type counts, it is reported already."""
    return not isinstance(node, nodes.Sequence) or bool(node.items)


def _head(root: Node) -> Span:
    """The first key of the file: where to report what the file lacks."""
    return root.pairs[0][0].span if isinstance(root, nodes.Mapping) and root.pairs else root.span


def _check_version(entries: Mapping[str, Entry], root: Node, findings: Findings) -> None:
    if "version" not in entries:
        findings.add("CP008", "the schedule has no `version`", _head(root), f"write `version: {LANGUAGE_VERSION}`")
        return
    node = entries["version"].value
    hint = f"write `version: {LANGUAGE_VERSION}`"
    if not isinstance(node, Scalar) or not node.is_integer:
        wrong_type(node, "`version` is an integer", findings, hint)
    elif node.value != str(LANGUAGE_VERSION):
        findings.add("CP010", f"version {shown(node.value)[1:-1]} of the language is not known", node.span, hint)


def _read_name(entries: Mapping[str, Entry], root: Node, findings: Findings) -> tuple[str, Span]:
    if "name" not in entries:
        findings.add("CP008", "the schedule has no `name`", _head(root), "as in `name: my_schedule`")
        return "", _head(root)
    node = entries["name"].value
    name = read_text(node, "`name`", findings)
    if name is not None and (not name.strip() or not name.isprintable() or len(name) > MAX_NAME_CHARS):
        hint = f"a name is one line of 1 to {MAX_NAME_CHARS} characters"
        findings.add("CP014", f"{describe(node)[9:]} cannot name a schedule", node.span, hint)
    return name or "", node.span


def _bound(params: Mapping[str, Declared | None], lines: tuple[Line, ...], findings: Findings) -> tuple[Param, ...]:
    """The sound params, with bounds that fit every use of them."""
    by_param: defaultdict[str, list[Use]] = defaultdict(list)
    for use in uses(lines):
        by_param[use.param].append(use)
    bounded = [declared.bounded(by_param[name], findings) for name, declared in params.items() if declared is not None]
    return tuple(param for param in bounded if param is not None)
