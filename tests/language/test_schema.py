"""The JSON Schema against the parser: what one takes the other takes, and what it cannot see is listed here."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from commplan.language import RULES, examine, library
from commplan.language.schema import HINTS, decimal_pattern, json_schema
from tests.random_schedules import schedules

CASES = Path(__file__).parents[1] / "cases"
SCHEMA = json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)

BEYOND = {
    "CP001": "no data comes of what is not YAML",
    "CP002": "characters of the file are gone when it is data, bytes are decoded",
    "CP004": "the size and the depth of a file are not those of its data",
    "CP005": "anchors, aliases, merge keys, tags and documents are resolved when a file is data",
    "CP006": "data has each key once",
    "CP020": "a schema cannot look up a param elsewhere in the file",
    "CP021": "a schema cannot compare two numbers of a file",
    "CP023": "a schema cannot see what is not used, and a warning is no error",
    "CP026": "a schema cannot look up a lane elsewhere in the file",
    "CP027": "a schema cannot see what is not used, and a warning is no error",
    "CP031": "a schema cannot compare two lines",
}
"""Rules that the schema cannot express -> why."""

STRICTER = {"wrong_axis": "an axis that is not the kind's own is well written, and wrong for every model"}
"""Cases without a finding of CP0xx that the schema refuses all the same -> why."""


def data_of(text: str) -> Any:
    """What an editor validates: the data of a file, keys as text."""
    return _plain(YAML(typ="safe", pure=True).load(text.removeprefix("\ufeff")))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key, default=str): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def accepts(data: Any) -> bool:
    return bool(VALIDATOR.is_valid(data))


def codes(text: str) -> set[str]:
    return {violation.code for violation in examine(text)[1]}


def why(data: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(data)]


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    Draft7Validator.check_schema(SCHEMA | {"$schema": "http://json-schema.org/draft-07/schema#"})


def parts(schema: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every schema in a schema, with its place."""
    if isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from parts(value, (*at, str(number)))
    elif isinstance(schema, dict):
        yield at, schema
        for key, value in schema.items():
            if key in {"properties", "patternProperties", "$defs"}:
                for name, part in value.items():
                    yield from parts(part, (*at, key, name))
            elif key not in {"defaultSnippets", "enum", "enumDescriptions"}:
                yield from parts(value, (*at, key))


def test_it_has_no_keyword_that_editors_do_not_know() -> None:
    draft_7 = set(Draft7Validator.META_SCHEMA["properties"])
    assert {key for _, part in parts(SCHEMA) for key in part} - draft_7 == {"$defs"} | HINTS


def test_an_editor_says_what_is_wrong_in_words() -> None:
    for at, part in parts(SCHEMA):
        assert not {"not", "oneOf"} & set(part), (at, "an editor shows no message for these but its own, which says nothing")
        assert ("pattern" in part) <= ("patternErrorMessage" in part), at
        assert len(part.get("enum", ())) == len(part.get("enumDescriptions", ())), at


def test_an_editor_writes_nothing_that_was_not_asked_for() -> None:
    for at, part in parts(SCHEMA):
        assert "default" not in part, at  # yaml-language-server writes it for each key of a mapping
        assert not {"required", "properties"} <= set(part) or at == (), (at, "it would offer a key twice")


OFFERED = [(at, part, offer["bodyText"]) for at, part in parts(SCHEMA) for offer in part.get("defaultSnippets", ())]


def test_what_an_editor_offers_to_write_is_right() -> None:
    for at, part, text in OFFERED:
        holder = SCHEMA["properties"][at[1]] if at[1] in {"params", "lanes"} else part
        assert VALIDATOR.evolve(schema=holder | {"$defs": SCHEMA["$defs"]}).is_valid(data_of(text)), (at, text)
        if at[-1] == "items" and len(at) == 3:
            assert codes(f"version: 1\nname: x\n{at[1]}:\n  - {text}\n") == set()


@pytest.mark.parametrize("attribute", ["after", "lane", "fuse", "chunks", "dtype", "when", "kind", "axis"])
def test_an_editor_offers_values_for_each_attribute(attribute: str) -> None:
    places = {at[:4] for at, _, _ in OFFERED} | {at for at, part in parts(SCHEMA) if "enum" in part}
    holders = [name for name, op in SCHEMA["$defs"].items() if attribute in op["properties"]]
    assert holders
    assert all(("$defs", name, "properties", attribute) in places for name in holders)


RIGHT = [*(CASES / "ok").glob("*.yaml"), *map(library.find, library.names())]


@pytest.mark.parametrize("path", RIGHT, ids=lambda path: path.stem)
def test_right_schedules_are_accepted(path: Path) -> None:
    assert why(data_of(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("path", sorted((CASES / "err").glob("*.yaml")), ids=lambda path: path.stem)
def test_wrong_schedules_are_refused(path: Path) -> None:
    found = set(re.findall(r"^\d+:\d+: (CP\d+)", path.with_suffix(".expected").read_text(encoding="utf-8"), re.MULTILINE))
    of_the_language = {code for code in found if code.startswith("CP0")}
    try:
        data = data_of(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError, RecursionError):  # the last: a list that holds itself
        assert of_the_language <= set(BEYOND)
        return
    if of_the_language - set(BEYOND) or path.stem in STRICTER:
        assert not accepts(data)
    elif not of_the_language:
        assert why(data) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_example_of_each_rule(rule: Any) -> None:
    assert why(data_of(rule.right)) == []
    try:
        data = data_of(rule.wrong)
    except YAMLError:
        assert rule.code in BEYOND
        return
    if rule.code not in BEYOND:
        assert not accepts(data)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.code in BEYOND], ids=lambda rule: rule.code)
def test_what_is_beyond_the_schema_is(rule: Any) -> None:
    try:
        data = data_of(rule.wrong)
    except YAMLError:
        return
    assert accepts(data) == (rule.code != "CP004")  # its nesting is of the wrong type too


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_random_schedules_are_accepted_when_the_parser_takes_them(text: str) -> None:
    assert accepts(data_of(text)) == (not codes(text) - set(BEYOND))


WORDS = (
    "n k own 1 wait compute shard replicate bf16 bfloat16 every last_backward apply all_reduce reduce_scatter 64MiB 0MB "
    "RS_n RS_<n> RS_<n-1> RS_<n+k> RS_<n-1025> RS_* RS_5 Mine_n my_AR_n"
)
VALUES = st.sampled_from(
    [
        *(None, True, -1, 0, 1, 2, 1024, 1025, 10**7, 1.5, "", " ", "a b", "64 MiB", "x\ny", *WORDS.split()),
        *([], {}, [[]], ["RS_n", "AR_<n-2>"], ["RS_n", 1], {"modules": 2}, {"bytes": 4096, "tail": 1}, {"default": 1}),
        *({"min": 1}, {"RS_n": None}, {"wait": "RS_n"}, {"RS_n": {}, "AR_n": {}}, {"AG_n": {"chunks": 2}}),
        {"Mine_<n-1>": {"kind": "all_reduce"}},
    ]
)
KEY_WORDS = (
    "version name summary params lanes pre_backward post_backward root pre_forward for k own after lane fuse chunks dtype "
    "when kind axis modules bytes tail default min max priority communicator wait RS_n AR_<n-1> apply_n AG_<n+1> "
    "compute_n Mine_n RS_* x-y n"
)
KEYS = st.sampled_from(KEY_WORDS.split())
EVERY_FORM = data_of((CASES / "ok" / "every_form.yaml").read_text(encoding="utf-8"))
SHORT = data_of((CASES / "ok" / "params_at_zero.yaml").read_text(encoding="utf-8"))
PARTLY = {"CP022"}
"""Rules that the schema sees a part of: it knows reserved names of params, not those that are lanes of the same file."""


def holders(data: Any) -> list[Any]:
    """Every list and mapping in some data."""
    if isinstance(data, dict):
        return [data, *(found for value in data.values() for found in holders(value))]
    return [data, *(found for value in data for found in holders(value))] if isinstance(data, list) else []


@st.composite
def mutants(draw: st.DrawFn) -> Any:
    """A right schedule with one to three values replaced, keys added, renamed or dropped."""
    data = copy.deepcopy(draw(st.sampled_from([EVERY_FORM, SHORT])))
    for _ in range(draw(st.integers(1, 3))):
        holder = draw(st.sampled_from(holders(data)))
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        place = draw(st.sampled_from(places)) if places else None
        what = draw(st.sampled_from(["replace", "drop", "add", "rename"]))
        if what == "add" or place is None:
            if isinstance(holder, dict):
                holder[draw(KEYS)] = copy.deepcopy(draw(VALUES))
            else:
                holder.append(copy.deepcopy(draw(VALUES)))
        elif what == "replace":
            holder[place] = copy.deepcopy(draw(VALUES))
        elif what == "rename" and isinstance(holder, dict):
            holder[draw(KEYS)] = holder.pop(place)
        else:
            del holder[place]
    return data


@given(mutants())
@settings(max_examples=600, deadline=None)
def test_mutants_are_refused_by_both_or_by_neither(data: Any) -> None:
    found = codes(json.dumps(data))
    seen = found - set(BEYOND) - PARTLY
    if seen:
        assert not accepts(data), seen
    elif not found - {"CP023", "CP027"}:
        assert why(data) == []


HEAD = """\
version: 1
name: x
params: {k: 2}
lanes: {own: {}}
"""
NUMBERS = [None, True, -1, 0, 1, 2, 1024, 1025, 10**6, 10**6 + 1, 2**63 - 1, 2**64, 1.5, "k", "1", "", "a b", [], {}]
SIZES = ["64MiB", "0MB", "00GB", "010KiB", "64 MiB", "64mib", "1.5GiB", "MiB", "k8"]
FUSES = [None, 4, "4", [], {}, {"modules": 2, "bytes": 2}, {"tail": 1}, {"modules": 2, "bites": 1}]
FUSES += [{"modules": 2, "tail": value} for value in NUMBERS] + [{"modules": value} for value in NUMBERS]
FUSES += [{"bytes": value} for value in (*NUMBERS, *SIZES)]
NAMED = [None, True, 3, "", "k", "own", "shard", "compute", "a b", "my-lane", [], {}]
REFS = [None, 1, "", "RS_n", "RS_<n>", "RS_*", "RS_<n-1>", "RS_<n+k>", "RS_<n-1025>", "RS_5", "compute_n", "a_b_n", "RS"]
ATTRIBUTES = {
    "after": [*REFS, *([ref] for ref in REFS), [], ["RS_n", "AR_<n-1>"], ["RS_n", None], {}, {"RS_n": 1}, [["RS_n"]]],
    "lane": NAMED,
    "fuse": FUSES,
    "chunks": NUMBERS,
    "dtype": [None, True, 16, "fp32", "bf16", "fp16", "float32", "FP32", [], {}],
    "when": [None, True, 1, "every", "last_backward", "never", [], {}],
    "kind": [None, 1, "all_gather", "reduce_scatter", "all_reduce", "apply", "compute", "AR", [], {}],
    "axis": [None, 1, "shard", "replicate", "Shard", [], {}],
    "afer": ["RS_n"],
    "for": ["moe"],
}
OPS = [("AG", None), ("RS", None), ("AR", None), ("apply", None), ("compute", None), ("Mine", None)]
OPS += [("Mine", kind) for kind in ("all_gather", "reduce_scatter", "all_reduce", "apply", "other")]


def assert_alike(section: str, values: list[Any]) -> None:
    """The schema refuses those of some lines that the parser refuses."""
    text = f"{HEAD}{section}:\n" + "".join(f"  - {json.dumps(value)}\n" for value in values)
    first = HEAD.count("\n") + 2
    refused = {tuple(error.absolute_path)[:2] for error in VALIDATOR.iter_errors(data_of(text))}
    by_line: dict[int, set[str]] = {}
    for violation in examine(text)[1]:
        by_line.setdefault(violation.span.line - first, set()).add(violation.code)
    for number, value in enumerate(values):
        found = by_line.get(number, set())
        if not found or found - set(BEYOND):
            assert ((section, number) in refused) == bool(found), (value, found)


@pytest.mark.parametrize(("family", "kind"), OPS)
@pytest.mark.parametrize("section", ["pre_backward", "post_backward", "root"])
def test_each_value_of_each_attribute(section: str, family: str, kind: str | None) -> None:
    lines = []
    for name, values in ATTRIBUTES.items():
        for value in values:
            if (kind, name, value) != ("all_reduce", "axis", "shard"):  # what STRICTER is about
                own = family if family != "Mine" else f"Mine{len(lines)}"
                lines.append({f"{own}_n": ({"kind": kind} if kind else {}) | {name: value}})
    assert_alike(section, lines)


@pytest.mark.parametrize("section", ["pre_backward", "post_backward", "root"])
def test_each_form_of_a_line(section: str) -> None:
    values = [None, True, 1, "", "wait", "RS", "Mine_n", [], [[]], ["RS_n"], {}, {"wait": None}, {"RS_n": None}, {"RS_n": []}]
    values += [{"RS_n": "compute_n"}, {"RS_n": {}, "AR_n": {}}, {"RS_n": None, "after": "compute_n"}, {"after": "RS_n"}]
    values += [{"wait": ref} for ref in ATTRIBUTES["after"]] + [{"Mine_n": None}, {"for": "moe"}, {"for": "moe", "RS_n": {}}]
    for ref in REFS:
        values += [ref, {str(ref): None}, {str(ref): {"kind": "all_reduce"}}]
    assert_alike(section, values)


def test_each_form_of_a_declaration() -> None:
    names = [
        "k",
        "n",
        "own",
        "tail",
        "shard",
        "compute",
        "RS",
        "bf16",
        "modules",
        "a_b",
        "_a",
        "1st",
        "my-k",
        "a b",
        "",
        "K9",
        "é",
    ]
    params = [(f"p{number}", value) for number, value in enumerate(NUMBERS)]
    params += [(f"q{number}", {"default": value}) for number, value in enumerate(NUMBERS)]
    params += [(f"r{number}", {"default": 1, key: 1}) for number, key in enumerate(("min", "max", "Min", "least"))]
    params += [("s0", {"min": 1}), ("s1", {"default": 1, "min": -1}), ("s2", {"default": 1, "max": 2**64})]
    params += [(name, 1) for name in names]
    lanes = [(name, {}) for name in names] + [("l0", None), ("l1", 1), ("l2", []), ("l3", "high"), ("l4", {"prio": "high"})]
    for key, values in (("priority", ("high", "normal", "low", 1, None)), ("communicator", ("own", "shared", True, None))):
        lanes += [(f"{key}{number}", {key: value}) for number, value in enumerate(values)]
    for section, entries in (("params", params), ("lanes", lanes)):
        written = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries]
        head = f"version: 1\nname: x\npost_backward: [RS_n]\n{section}:\n"
        text = head + "".join(f"  {entry}\n" for entry in written)
        refused = [list(error.absolute_path) for error in VALIDATOR.iter_errors(data_of(text))]
        found = {violation.span.line - head.count("\n") - 1 for violation in examine(text)[1] if violation.code not in BEYOND}
        for number, entry in enumerate(entries):
            alone = {"version": 1, "name": "x", "post_backward": ["RS_n"], section: dict([entry])}
            assert accepts(alone) == (number not in found), entry
        assert refused


@pytest.mark.parametrize(
    "name", ["x", "a b", "é", "", " ", "  ", "x" * 100, "x" * 101, "a\nb", "a\n", "a\x07", "a\u2028", 7, None, []]
)
def test_names_of_schedules(name: Any) -> None:
    data = {"version": 1, "name": name, "post_backward": ["RS_n"]}
    assert accepts(data) == (not codes(json.dumps(data)))


@pytest.mark.parametrize("section", ["pre_backward", "post_backward", "root"])
@pytest.mark.parametrize("value", [None, [], ["RS_n"], {}, {"RS_n": None}, "RS_n", 1])
def test_sections(section: str, value: Any) -> None:
    for data in ({"version": 1, "name": "x", section: value}, {"version": 1, "name": "x", "lanes": None, section: value}):
        assert accepts(data) == (not codes(json.dumps(data)))


@given(st.from_regex(r"\A(RS|AR|wait|a_b|my2|compute)?_?[<(]?(n|\*|[0-9])?[-+]?(k|0|0?[0-9]{1,4}|n)?[>)]?\Z"))
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("section", ["post_backward", "root"])
def test_names_of_ops_are_those_of_the_parser(section: str, name: str) -> None:
    data = {"version": 1, "name": "x", "params": {"k": 2}, section: [{"wait": name}, {"wait": "RS_n"}]}
    placed = {"version": 1, "name": "x", "params": {"k": 2}, section: [{name: {"after": "RS_n"}}, {"wait": "RS_n"}]}
    for made in (data, placed):
        assert accepts(made) == (not codes(json.dumps(made)) - set(BEYOND))


@pytest.mark.parametrize("most", [0, 1, 9, 10, 19, 99, 100, 101, 909, 1024, 2000])
def test_decimal_patterns(most: int) -> None:
    matching = [text for text in map(str, range(20_000)) if re.fullmatch(decimal_pattern(most), text)]
    assert matching == [str(number) for number in range(most + 1)]
    assert not re.fullmatch(decimal_pattern(most), "00")
