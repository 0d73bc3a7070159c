"""Schedules written at random and read again; broken ones; and texts that are no schedules at all."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commplan.errors import CommplanError, ScheduleError, Severity
from commplan.language import examine, library, load, parse, warnings
from commplan.language.nodes import MAX_DEPTH
from commplan.language.source import MAX_FILE_BYTES
from commplan.language.spec import OpLine, ScheduleSpec, WaitLine
from commplan.ops import Axis, Kind, Section, When

REPO = Path(__file__).parents[2]
VALID = [
    path.read_text(encoding="utf-8")
    for path in (*sorted((REPO / "schedules").glob("*.yaml")), REPO / "tests/cases/ok/every_form.yaml")
]

# ------------------------------------------------------------------------------------------------ schedules at random

KINDS = {"AG": Kind.ALL_GATHER, "RS": Kind.REDUCE_SCATTER, "AR": Kind.ALL_REDUCE, "apply": Kind.APPLY, "Mean": Kind.ALL_REDUCE}
AXES = {"AG": Axis.SHARD, "RS": Axis.SHARD, "AR": Axis.REPLICATE, "apply": None, "Mean": Axis.REPLICATE}
LANES = {"AG": "shard", "RS": "shard", "AR": "replicate", "apply": "compute", "Mean": "replicate"}


@dataclass
class Drawn:
    """What a line should read as: its text, and the facts that the spec must hold."""

    op: str
    attributes: dict[str, Any] = field(default_factory=dict)


def ops(section: Section, every: bool) -> st.SearchStrategy[str]:
    offsets = ["n"] if section is Section.ROOT else ["n", "<n-1>", "<n+1>", "<n-k>", "<n+12>"]
    return st.builds(
        "{}_{}".format, st.sampled_from([*KINDS, *(["compute"] if every else [])]), st.sampled_from(offsets + ["*"] * every)
    )


@st.composite
def drawn_lines(draw: st.DrawFn, section: Section) -> Drawn:
    refs = st.lists(ops(section, every=True), min_size=1, max_size=3)
    if draw(st.booleans()):
        return Drawn("wait", {"refs": draw(refs)})
    op = draw(ops(section, every=False))
    family = op.split("_", 1)[0]
    choices: dict[str, st.SearchStrategy[Any]] = {"after": refs, "lane": st.sampled_from(["outer", "replicate"])}
    if family != "apply":
        choices |= {
            "chunks": st.integers(1, 9) | st.just("k"),
            "fuse": st.sampled_from([{"modules": 4}, {"bytes": "2KiB", "tail": "k"}]),
        }
    if family in ("RS", "AR", "Mean"):
        choices |= {"dtype": st.sampled_from(["fp32", "bf16", "fp16"]), "when": st.sampled_from(["every", "last_backward"])}
    names = draw(st.lists(st.sampled_from(sorted(choices)), unique=True))
    attributes = {name: draw(choices[name]) for name in names}
    return Drawn(op, attributes | ({"kind": "all_reduce"} if family == "Mean" else {}))


def as_yaml(value: Any, flow: bool) -> str:
    """JSON is YAML; plain words need no quotes in either style."""
    text = json.dumps(value)
    return text if flow else text.replace('"', "")


@given(st.data())
@settings(max_examples=150)
def test_what_is_written_is_what_is_read(data: st.DataObject) -> None:
    quoted = data.draw(st.booleans())
    written = {section: data.draw(st.lists(drawn_lines(section), min_size=1, max_size=4)) for section in Section}
    text = "version: 1\nname: drawn\nparams: {k: {default: 3, min: 1, max: 5}}\nlanes: {outer: {priority: high}}\n"
    places: list[tuple[int, str]] = []
    for section, lines in written.items():
        text += f"{section}:\n"
        for line in lines:
            places.append((text.count("\n") + 1, line.op))
            value = line.attributes.get("refs", line.attributes)
            text += f"  - {line.op}: {as_yaml(value, quoted)}\n" if value or line.op == "wait" else f"  - {line.op}\n"
    spec = parse(text, "drawn.yaml")

    read = [line for section in Section for line in spec.lines(section)]
    assert [(line.span.line, line.span.column) for line in read] == [(number, 5) for number, _ in places]
    for line, drawn in zip(read, [line for lines in written.values() for line in lines], strict=True):
        if isinstance(line, WaitLine):
            assert [str(ref) for ref in line.refs] == drawn.attributes["refs"]
        else:
            check_op(line, drawn)
    rest = text.splitlines()
    for line in read:
        for ref in line.refs if isinstance(line, WaitLine) else (line.ref, *line.after):
            at = ref.span
            assert rest[at.line - 1] == at.text
            assert at.text[at.column - 1 :][: at.length].strip('"') == str(ref)


def check_op(line: OpLine, drawn: Drawn) -> None:
    family = drawn.op.split("_", 1)[0]
    given = drawn.attributes
    assert str(line.ref) == drawn.op
    assert (line.kind, line.axis) == (KINDS[family], AXES[family])
    assert [str(ref) for ref in line.after] == given.get("after", [])
    assert line.lane == given.get("lane", LANES[family])
    assert str(line.chunks) == str(given.get("chunks", 1))
    assert line.dtype == given.get("dtype")
    assert line.when == When(given.get("when", "every"))
    assert set(line.spans) == set(given)
    fuse = given.get("fuse")
    if fuse is None:
        assert line.fuse is None
    else:
        assert line.fuse is not None
        assert (line.fuse.modules and line.fuse.modules.value) == fuse.get("modules")
        assert (line.fuse.size_bytes and line.fuse.size_bytes.value) == (2048 if "bytes" in fuse else None)
        assert str(line.fuse.tail) == fuse.get("tail", "0")


# -------------------------------------------------------------------------------------------- one fault, in its place

FAULTS = {
    "after:": ("aftr:", "CP007"),
    "RS_n:": ("RS_9:", "CP016"),
    "RS_<n-1>": ("RS_<n-zzz>", "CP020"),
    "apply_n:": ("compute_n:", "CP019"),
    "version: 1": ("version: 3", "CP010"),
    "post_backward:": ("post_bckward:", "CP007"),
    "- wait:": ("- waits:", "CP016"),
    "{after: RS_n}": ("{after: RS_n, lane: nowhere}", "CP026"),
    "root:": ("root: &x", "CP005"),
}


@pytest.mark.parametrize(("old", "new", "code"), [(old, *new) for old, new in FAULTS.items()])
def test_a_fault_is_found_in_its_line(old: str, new: str, code: str) -> None:
    tried = 0
    for text in VALID:
        for number, line in enumerate(text.splitlines(), 1):
            if old not in line.split("#")[0]:
                continue
            tried += 1
            lines = text.splitlines()
            lines[number - 1] = line.replace(old, new)
            _, found = examine("\n".join(lines))
            assert (number, code) in [(v.span.line, v.code) for v in found]
            assert {v.span.line for v in found if v.code == code} == {number}
    assert tried


@given(st.sampled_from(VALID), st.data())
def test_two_faults_are_both_found(text: str, data: st.DataObject) -> None:
    lines = text.splitlines()
    places = [(i, old) for i, line in enumerate(lines) for old in FAULTS if old in line.split("#")[0]]
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=2, max_size=3, unique_by=lambda place: place[0]))
    for i, old in chosen:
        lines[i] = lines[i].replace(old, FAULTS[old][0])
    _, found = examine("\n".join(lines))
    if any(FAULTS[old][1] == "CP007" and old == "post_backward:" for _, old in chosen):
        return  # lines of a section that is not known are not read
    assert {(i + 1, FAULTS[old][1]) for i, old in chosen} <= {(v.span.line, v.code) for v in found}


def test_findings_come_in_the_order_of_the_file() -> None:
    with pytest.raises(ScheduleError) as caught:
        load(REPO / "tests/cases/err/wrong_types.yaml")
    places = [(v.span.line, v.span.column) for v in caught.value.violations]
    assert places == sorted(places)
    assert len(places) > 10


# --------------------------------------------------------------------------------------------------- no schedule at all


def survives(text: str) -> ScheduleSpec | None:
    """Reads a text; whatever it is, it is a schedule or has errors with sound places."""
    spec, found = examine(text)
    assert (spec is None) == any(v.severity is Severity.ERROR for v in found)
    for violation in found:
        span = violation.span
        assert span.line >= 1
        assert span.column >= 1
        assert span.length >= 1
        assert span.column <= len(span.text) + 1
        str(violation).encode("utf-8")
        violation.hint.encode("utf-8")
    return spec


@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    survives(text)


TOKENS = [
    "version",
    ": ",
    "1",
    "name",
    "\n",
    "  ",
    "- ",
    "{",
    "}",
    "[",
    "]",
    ", ",
    "RS_n",
    "AR_<n-1>",
    "wait",
    "after",
    "compute_n",
    "post_backward",
]
TOKENS += [
    "root",
    "&a",
    "*a",
    "<<",
    "!x",
    "? ",
    "|",
    ">",
    "'",
    '"',
    "#",
    "%",
    "---",
    "...",
    "\t",
    "\\",
    "params",
    "lanes",
    "k",
    "fuse",
    "64MiB",
    "null",
]
TOKENS += ["0", "-1", "1e9", "true", "~", "\r", "\u2028", "\x85", "\ufeff", "é", '"\\UFFFFFFFF"', '"\\ud800"', "%YAML 1.1\n"]


@given(st.lists(st.sampled_from(TOKENS), max_size=60).map("".join))
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_any_jumble_of_tokens_is_read_or_refused(text: str) -> None:
    survives(text)


@given(st.sampled_from(VALID), st.data())
@settings(max_examples=300)
def test_any_damage_is_read_or_refused(text: str, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 8))
        text = text[:at] + data.draw(st.sampled_from(["", *TOKENS])) + text[at + cut :]
    survives(text)


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "some.yaml"
    path.write_bytes(data)
    with suppress(CommplanError):
        load(path)


@pytest.mark.parametrize(
    "part",
    [
        "[",
        "{",
        "[{",
        "- ",
        "? ",
        "[a, ",
        "{a: ",
        "&a ",
        "a: ",
        "'",
        '"',
        "x",
        "- [x, y]\n",
        "!a ",
        "\n",
        " ",
        "#",
        "[[]],",
        "%",
    ],
)
def test_long_texts_are_refused(part: str) -> None:
    for size in (MAX_FILE_BYTES, 100_000):
        assert survives((part * size)[:size]) is None


def test_nesting_is_counted_not_climbed() -> None:
    text = "version: 1\nname: deep\nsummary: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert [v.code for v in examine(text)[1]] == ["CP004"]
    text = "version: 1\nname: deep\nsummary: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert "CP004" not in [v.code for v in examine(text)[1]]


@pytest.mark.parametrize("number", ["9" * 5000, "-" + "9" * 5000, "9" * 5000 + "KiB"])
def test_huge_numbers_are_refused(number: str) -> None:
    base = library.find("blocking").read_text(encoding="utf-8")
    for place in (
        f"version: {number}",
        f"RS_n: {{chunks: {number}}}",
        f"RS_n: {{fuse: {{bytes: {number}}}}}",
        f"RS_<n-{number}>",
    ):
        text = base.replace("version: 1", place) if place.startswith("version") else base + f"  - {place}\n"
        assert survives(text) is None


def test_what_serves_no_purpose_is_a_warning() -> None:
    text = VALID[0].replace("post_backward:", "params: {k: 2}\nlanes: {outer: {}}\npost_backward:")
    spec, found = examine(text)
    assert spec is not None
    assert [(v.code, v.severity) for v in found] == [("CP023", Severity.WARNING), ("CP027", Severity.WARNING)]
    assert warnings(parse(text)) == found


def test_line_endings_and_byte_order_mark_make_no_difference() -> None:
    for text in VALID:
        plain = parse(text)
        assert parse("\ufeff" + text.replace("\n", "\r\n")) == plain


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.yaml", Path("a\0b")):
        with pytest.raises(CommplanError, match="cannot read") as caught:
            load(path)
        assert not isinstance(caught.value, ScheduleError)
