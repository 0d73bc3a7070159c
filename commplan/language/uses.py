"""Where a schedule uses numbers: the one place that knows what each may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from commplan.errors import Span
from commplan.language.fields import Range
from commplan.language.refs import MAX_OFFSET
from commplan.language.spec import Line, Number, OpLine, OpRef

# Beyond these a schedule means the same as with less, or nothing that could be run.
OFFSET: Final = Range("an offset", 0, MAX_OFFSET)
CHUNKS: Final = Range("`chunks`", 1, 1024)
FUSE_MODULES: Final = Range("`modules`", 1, 1_000_000)
FUSE_TAIL: Final = Range("`tail`", 0, 1_000_000)
FUSE_BYTES: Final = Range("`bytes`", 1, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Use:
    """A param in the place of a number."""

    param: str
    allowed: Range
    span: Span


def uses(lines: Iterable[Line]) -> Iterator[Use]:
    """Every use of a param, line by line."""
    for line in lines:
        for number, allowed, span in _numbers(line):
            if number is not None and number.param is not None:
                yield Use(number.param, allowed, span)


def _numbers(line: Line) -> Iterator[tuple[Number | None, Range, Span]]:
    refs: tuple[OpRef, ...] = (line.ref, *line.after) if isinstance(line, OpLine) else line.refs
    for ref in refs:
        yield ref.index.distance, OFFSET, ref.span
    if isinstance(line, OpLine):
        yield line.chunks, CHUNKS, line.spans.get("chunks", line.span)
        if line.fuse is not None:
            span = line.spans.get("fuse", line.span)
            yield line.fuse.modules, FUSE_MODULES, span
            yield line.fuse.size_bytes, FUSE_BYTES, span
            yield line.fuse.tail, FUSE_TAIL, span
