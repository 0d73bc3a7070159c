"""CP403: sizes. One op that carries too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from commplan.errors import Rule, Severity, Violation
from commplan.graph.model import Family, ScheduleGraph
from commplan.graph.place import wire_bytes, wire_dtype
from commplan.graph.rules.rule import GraphRule
from commplan.language.modules import Module
from commplan.language.spec import OpLine
from commplan.ops import ITEMSIZE_BYTES, Kind, OpId

MAX_OP_NUMEL: Final = 2**31 - 1
"""Elements on one rank that one collective carries at most: what a count of 32 bits can say."""

MAX_CHUNKS: Final = 1024


def too_large(graph: ScheduleGraph) -> Iterator[Violation]:
    """Collectives of more than `MAX_OP_NUMEL` elements; of each line the largest."""
    for family in graph.families.values():
        if family.line.axis is None:
            continue
        largest = max(_loads(graph, family), key=lambda load: load.numel, default=None)
        if largest is None or largest.numel <= MAX_OP_NUMEL:
            continue
        named = ", ".join(module.name for module in largest.members[:2]) + (", ..." if len(largest.members) > 2 else "")
        yield Violation(
            "CP403",
            f"{largest.op} ({named}) carries {largest.size_bytes:,} bytes in one op: "
            f"{largest.numel:,} elements, more than {MAX_OP_NUMEL:,}",
            family.line.span,
            ", or ".join(_remedies(largest)),
            severity=Severity.WARNING,
        )


@dataclass(frozen=True, slots=True)
class _Load:
    """What one collective carries; `size_bytes` of its larger side, of one piece, on one rank."""

    line: OpLine
    op: OpId
    members: tuple[Module, ...]
    num_pieces: int
    size_bytes: int

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[wire_dtype(self.members[0], self.line)]

    @property
    def numel(self) -> int:
        return self.size_bytes // self.itemsize_bytes


def _loads(graph: ScheduleGraph, family: Family) -> Iterator[_Load]:
    num_pieces = family.line.chunks.resolve(graph.params)
    for pieces in dict.fromkeys(family.pieces):
        op = graph.nodes[pieces[0]].op
        if op is not None and not graph.is_left_out(pieces):
            members = tuple(graph.module(family.line.kind, n) for n in op.members)
            whole_bytes = sum(_larger_side_bytes(module, family.line) for module in members)
            yield _Load(family.line, op, members, num_pieces, -(-whole_bytes // num_pieces))


def _larger_side_bytes(module: Module, line: OpLine) -> int:
    """Bytes of an all-gather's output, else of the input."""
    return wire_bytes(module, line) * (module.shard_size if line.kind is Kind.ALL_GATHER else 1)


def _remedies(load: _Load) -> Iterator[str]:
    most_bytes = MAX_OP_NUMEL * load.itemsize_bytes
    if len(load.members) > 1:
        yield f"put less into a bucket: `fuse: {{bytes: {most_bytes >> 30}GiB}}` at most"
    else:
        (module,) = load.members
        parameters = module.parameters if load.line.kind is Kind.ALL_GATHER else module.trainable
        if len(parameters) > 1:
            share = max(parameter.padded_numel(module.shard_size) for parameter in parameters)
            share_bytes = share * load.itemsize_bytes // (module.shard_size if load.line.kind is Kind.ALL_REDUCE else 1)
            yield f"give each of its {len(parameters)} parameters a group of its own: at most {share_bytes:,} bytes each"
    whole_bytes = load.size_bytes * load.num_pieces
    chunks = -(-whole_bytes // most_bytes)
    if chunks <= MAX_CHUNKS:
        yield f"write `chunks: {chunks}`: {-(-whole_bytes // chunks):,} bytes each"


RULES = (
    GraphRule(
        Rule(
            code="CP403",
            title="One op that is too large",
            severity=Severity.WARNING,
            what="One collective carries more than 2,147,483,647 elements on a rank: large tables in one parameter group, or "
            "too many modules in one bucket.",
            why="Counts of 32 bits overflow in libraries and kernels, the whole of it is in memory at once, and nothing of it "
            "is reduced before all of it is there.",
            wrong="""\
# modules: tables (replicate, shard; 248320x5120, 248320x5120)
version: 1
name: two_tables
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
# modules: head (replicate, shard; 248320x5120), embed (replicate, shard; 248320x5120)
version: 1
name: two_tables
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        too_large,
    ),
)
