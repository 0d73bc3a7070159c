"""Plans as text, against files that people have read."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan import compiler
from commplan.language import library
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis
from commplan.plan import BufferKind

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = {
    **{f"{name}_4": (name, 4) for name in library.names()},
    "gathers_and_buckets_5": (GOLDEN / "gathers_and_buckets.yaml", 5),
}


@pytest.mark.parametrize("name", CASES)
def test_text_is_as_it_was_read(name: str) -> None:
    schedule, num_modules = CASES[name]
    assert compiler.compile(schedule, num_modules).text() == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def test_two_embedding_tables_in_one_group() -> None:
    """Two tables of 248320 x 5120 in fp32: 10,171,187,200 bytes in one reduce-scatter, half of that in each of two."""
    axes = {Axis.SHARD: 2, Axis.REPLICATE: 2}
    tables = [Parameter(name=name, shape=(248320, 5120)) for name in ("embedding", "head")]

    def largest(*groups: list[Parameter]) -> int:
        modules = tuple(Module(name=f"m{n}", parameters=tuple(group), axes=axes) for n, group in enumerate(groups))
        plan = compiler.compile("blocking", ModuleTable(modules=modules))
        return max(buffer.size_bytes for buffer in plan.buffers if buffer.kind is BufferKind.RS_INPUT)

    assert largest(tables) == 10_171_187_200
    assert largest(tables[:1], tables[1:]) == 5_085_593_600
