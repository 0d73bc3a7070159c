"""Random texts, schedules, module tables and plans, as files hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from ruamel.yaml import YAML

from commplan import compiler
from commplan.language import library

MAX_FILE_BYTES = 100_000
TEXTS = tuple(library.find(name).read_text(encoding="utf-8") for name in library.names())
KNOWN = tuple(json.dumps(YAML(typ="safe", pure=True).load(text)) for text in TEXTS)
PIECES = (
    *("version: 1\n", "name: x\n", "post_backward:\n", "pre_backward:\n", "root:\n", "params:\n", "lanes:\n", "  - ", "wait: "),
    *(
        "RS_n",
        "AR_n",
        "apply_n",
        "AG_<n+1>",
        "AR_<n-k>",
        "RS_*",
        "compute_n",
        ": {after: ",
        "}",
        "[",
        "]",
        "{",
        ", ",
        ": ",
        "\n",
    ),
    *("  ", "\t", "&a ", "*a", "<<: ", "!x ", "? ", "| ", "> ", "'", '"', "#", "%", "---\n", "...\n", "\\", "null", "~", "\r"),
    *("0", "-1", "1e9", "99999999999999999999", "0x10", "64MiB", "true", "\u2028", "\x85", "\ufeff", "\x00", "é", "\U0001f600"),
)
WORDS = (
    *(
        "RS_n",
        "AR_n",
        "apply_n",
        "AG_n",
        "AG_<n+1>",
        "AR_<n-1>",
        "AR_<n-2>",
        "RS_<n-1024>",
        "AR_<n-k>",
        "RS_*",
        "compute_n",
        "n",
    ),
    *(
        "X_n",
        "wait",
        "after",
        "lane",
        "fuse",
        "chunks",
        "dtype",
        "when",
        "kind",
        "axis",
        "modules",
        "bytes",
        "tail",
        "k",
        "shard",
    ),
    *("replicate", "compute", "all_reduce", "apply", "reduce_scatter", "all_gather", "every", "last_backward", "bf16", "64MiB"),
    *("own", "high", "communicator", "priority", "default", "min", "max", "version", "name", "lanes", "params", "root", ""),
)
NUMBERS = st.one_of(st.integers(-2, 1025), st.sampled_from([2**31, 2**53, 2**63, 10**30, -(10**30), 10**400]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.sampled_from(WORDS), st.text(max_size=20))
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """Bytes, jumbles of tokens, a token over and over, and damaged schedules; in one encoding or another."""
    form = draw(st.sampled_from(["bytes", "text", "tokens", "many", "damage", "damage", "damage"]))
    if form == "bytes":
        return draw(st.binary(max_size=400))
    if form == "text":
        text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=400))
    elif form == "tokens":
        text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=80)))
    elif form == "many":
        part = "".join(draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4)))
        before = draw(st.sampled_from(["", "version: 1\nname: x\npost_backward:\n", *TEXTS]))
        length = draw(st.sampled_from([1_000, 60_000, MAX_FILE_BYTES // 4]))
        text = before + (part * length)[:length]
    else:
        text = draw(st.sampled_from(TEXTS))
        for _ in range(draw(st.integers(1, 4))):
            at, cut = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
            text = text[:at] + draw(st.sampled_from(("", *PIECES))) + text[at + cut :]
    return text.encode(draw(st.sampled_from(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-32"])))


@st.composite
def lines(draw: st.DrawFn) -> dict[str, Any]:
    """One line of a section: an op or a wait with sound attributes, large numbers included."""
    refs = st.lists(st.sampled_from(WORDS[:11]), min_size=1, max_size=4)
    if draw(st.integers(0, 3)) == 0:
        return {"wait": draw(refs)}
    optional = {
        "after": refs,
        "lane": st.sampled_from(["shard", "replicate", "a", "b"]),
        "fuse": st.fixed_dictionaries({"modules": st.sampled_from([1, 2, 7, 1000])}, optional={"tail": st.integers(0, 1024)}),
        "chunks": st.sampled_from([1, 2, 3, 64, 1024]),
        "when": st.sampled_from(["every", "last_backward"]),
    }
    return {draw(st.sampled_from(WORDS[:8])): draw(st.fixed_dictionaries({}, optional=optional))}


@st.composite
def schedules(draw: st.DrawFn) -> bytes:
    """YAML that means something: a schedule of the library or sections of sound lines, with other values in places."""
    if draw(st.booleans()):
        known = json.loads(draw(st.sampled_from(KNOWN)))
        if draw(st.booleans()):
            known["post_backward"] += draw(st.lists(lines(), max_size=2))
        for _ in range(draw(st.integers(0, 2))):
            _replace(draw, known)
        return json.dumps(known).encode()
    data: dict[str, Any] = {
        "version": 1,
        "name": "random",
        "params": {"k": draw(st.sampled_from([0, 1, 2, 40, 1024, {"default": 2, "min": 0, "max": 1024}]))},
        "lanes": {"a": None, "b": {"communicator": "own"}},
    }
    many = draw(st.sampled_from([1, 1, 1, 10, 200]))
    for section in ("pre_backward", "post_backward", "root"):
        data[section] = draw(st.lists(lines(), max_size=6)) * many
    if draw(st.booleans()):
        data["post_backward"] += [{"RS_n": {"after": "compute_n"}}, {"AR_n": {"after": "RS_n"}}, {"apply_n": {"after": "AR_n"}}]
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        _replace(draw, data)
    return json.dumps(data).encode()[:MAX_FILE_BYTES]


def _replace(draw: st.DrawFn, data: Any) -> None:
    """Put something else in one place of plain data."""
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in list(keys)[:40]:
            places.append((value, key))
            visit(value[key])

    visit(data)
    if places:
        holder, key = draw(st.sampled_from(places))
        if isinstance(holder, dict) and draw(st.booleans()):
            holder[draw(st.sampled_from(WORDS))] = holder.pop(key)
        else:
            holder[key] = draw(VALUES)


def _damaged(make: Callable[[], dict[str, Any]]) -> st.SearchStrategy[bytes]:
    @st.composite
    def strategy(draw: st.DrawFn) -> bytes:
        data = make()
        for _ in range(draw(st.integers(1, 3))):
            _replace(draw, data)
        text = json.dumps(data).encode()
        at = draw(st.integers(0, len(text)))
        return draw(st.sampled_from([text] * 5 + [text[:at], text[:at] + b"[" + text[at:]]))

    return strategy()


def module_tables() -> st.SearchStrategy[bytes]:
    """Module tables with other values in places."""
    return _damaged(lambda: dict(compiler.module_table(3).model_dump(mode="json")))


def plans() -> st.SearchStrategy[bytes]:
    """Plans with other values in places."""
    return _damaged(lambda: dict(json.loads(compiler.compile("delayed_allreduce", 3).to_json())))
