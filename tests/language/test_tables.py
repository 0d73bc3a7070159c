"""Module tables as JSON: round trips, and errors that name the place."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.errors import CommplanError
from commplan.language import Module, ModuleTable, Parameter, load_table, parse_table, validate_table
from commplan.ops import ITEMSIZE_BYTES, Axis

shapes = st.lists(st.integers(0, 50), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(ITEMSIZE_BYTES))


@st.composite
def tables(draw: st.DrawFn) -> ModuleTable:
    def parameter(number: int) -> Parameter:
        shape = draw(shapes)
        return Parameter(
            name=f"w{number}",
            shape=shape,
            dtype=draw(dtypes),
            requires_grad=draw(st.booleans()),
            shard_dim=draw(st.integers(0, max(len(shape) - 1, 0))),
        )

    modules = tuple(
        Module(
            name=draw(st.text(max_size=5)),
            parameters=tuple(parameter(i) for i in range(draw(st.integers(1, 3)))),
            axes=draw(st.dictionaries(st.sampled_from(Axis), st.integers(1, 8))),
            reduce_dtype=draw(dtypes),
            resharded_after_forward=draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 4)))
    )
    return ModuleTable(modules=modules, need_order=tuple(draw(st.permutations(range(len(modules))))))


@given(tables())
def test_a_table_and_its_json_are_inverses(table: ModuleTable) -> None:
    assert parse_table(table.model_dump_json()) == table
    assert validate_table(table.model_dump()) == table


@given(tables())
def test_padding_is_what_even_shards_need(table: ModuleTable) -> None:
    for module in table.modules:
        for p in module.parameters:
            if p.shape:
                rows = p.shape[p.shard_dim]
                padded = next(r for r in range(rows, rows + module.shard_size) if r % module.shard_size == 0)
                assert p.padded_numel(module.shard_size) * rows == p.numel * padded
        assert module.shard_bytes * module.shard_size == module.reduced_bytes


PLAIN = json.loads(ModuleTable.uniform(2).model_dump_json())


def changed(path: str, value: Any) -> dict[str, Any]:
    """A plain table with one value replaced; `path` as in `modules.1.name`."""
    table = json.loads(json.dumps(PLAIN))
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = table
    for part in way:
        place = place[part]
    place[last] = value
    return table


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("modules", [], "modules"),
        ("modules.1.name", 3, "modules[1].name"),
        ("modules.1.extra", 3, "modules[1].extra"),
        ("modules.0.parameters.0.shape.1", "4", "modules[0].parameters[0].shape[1]"),
        ("modules.0.parameters.0.shape.1", -4, "modules[0].parameters[0].shape[1]"),
        ("modules.0.parameters.0.shape.1", True, "modules[0].parameters[0].shape[1]"),
        ("modules.0.parameters.0.dtype", "int8", "modules[0].parameters[0]"),
        ("modules.0.parameters.0.shard_dim", 2, "modules[0].parameters[0]"),
        ("modules.0.axes.shard", 0, "modules[0].axes.shard"),
        ("modules.0.axes.outer", 2, "modules[0].axes.outer"),
        ("modules.0.reduce_dtype", "float31", "modules[0].reduce_dtype"),
        ("need_order", [0, 0], "need_order"),
        ("version", 2, "version"),
    ],
)
def test_each_wrong_value_is_named(path: str, value: Any, place: str) -> None:
    with pytest.raises(CommplanError) as caught:
        validate_table(changed(path, value), "t.json")
    lines = str(caught.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("t.json: ")
    assert place in lines[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "nul",
        "[" * 100_000,
        "9" * 5000,
        '{"a": 1, "a": 2}',
        '{"modules": NaN}',
        "\ud800",
        '"\\ud800"',
        '{"modules": 1e999}',
    ],
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(CommplanError, match=r"^t\.json"):
        parse_table(text, "t.json")


@given(st.text(st.sampled_from('{}[]":,0123456789.eE-+truefalsn modulesnameparametersshape\\u'), max_size=80))
def test_any_text_is_a_table_or_refused(text: str) -> None:
    with suppress(CommplanError):
        parse_table(text)


def test_files(tmp_path: Any) -> None:
    path = tmp_path / "table.json"
    path.write_text("\ufeff" + json.dumps(PLAIN), encoding="utf-8")
    assert load_table(path) == ModuleTable.uniform(2)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(CommplanError, match="UTF-8"):
        load_table(path)
    with pytest.raises(CommplanError, match="cannot read"):
        load_table(tmp_path / "none.json")


@pytest.mark.parametrize("data", [{"modules": {1, 2}}, {"modules": object()}])
def test_plain_data_that_is_no_json_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(CommplanError):
        validate_table(data)
