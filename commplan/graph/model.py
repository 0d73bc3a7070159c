"""The concrete graph of a schedule: nodes, edges with their reasons, the order, and what happens before what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from commplan.graph.clocks import Clocks
from commplan.graph.timeline import Timeline
from commplan.language.modules import Module, ModuleTable
from commplan.language.spec import OpLine, OpRef, ScheduleSpec, WaitLine
from commplan.ops import Kind, OpId


class Reason(StrEnum):
    """Why one node must be over before another starts."""

    AFTER = "after"
    WAIT = "wait"
    LANE = "lane"
    COMMUNICATOR = "communicator"
    HOOK = "hook"


class Role(StrEnum):
    """What a node stands for.

    A LEFT_OUT op is one that its module does not need: an empty task, in its place.  COMPUTE is the compute of a module and
    opens its post-backward hook; HOOK opens another hook.  ALL is over when every op of a family is.
    """

    OP = "op"
    LEFT_OUT = "left_out"
    COMPUTE = "compute"
    HOOK = "hook"
    WAIT = "wait"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `hook` is a place in the timeline; `key` orders the nodes of a hook as they are written."""

    role: Role
    hook: int
    key: tuple[int, ...]
    op: OpId | None = None
    line: OpLine | WaitLine | None = None
    lane: str = ""
    communicator: str = ""

    def __str__(self) -> str:
        return str(self.op) if self.op is not None else self.role.value


@dataclass(frozen=True, slots=True)
class Origin:
    """Where edges come from: why one node waits for another and, if that was written, which reference says so."""

    reason: Reason
    ref: OpRef | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Every op that one line of the schedule places: the number of a module -> its op's nodes, one for each piece, ascending.
    Modules that share an op (a bucket) share the range.
    """

    line: OpLine
    pieces: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class LateReference:
    """A line that names an op which is issued only later: `ref` in the line of `node` names `target`."""

    node: int
    target: int
    ref: OpRef


@dataclass(frozen=True, slots=True)
class Defects:
    """What could not be taken into the graph as written; the graph is whole without it.

    Attributes:
        repeated: lines that place a family once more, with the line that placed it first.
        unknown: references to families that no line places, with the line they stand in.
        late: dependencies on ops issued later, one for each pair of line and reference.
        cycles: cycles among the ops of one hook, each as node numbers; an op follows what it waits for.
    """

    repeated: tuple[tuple[OpLine, OpLine], ...] = ()
    unknown: tuple[tuple[OpLine | WaitLine, OpRef], ...] = ()
    late: tuple[LateReference, ...] = ()
    cycles: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ScheduleGraph:
    """A schedule laid out over a module table.

    Attributes:
        origins: where edges come from; one for all edges that one reference asks for.
        predecessors: node number -> the nodes that must be over before it starts, each with a number into `origins`. Large
            graphs consist of these, and dicts of plain numbers cost the garbage collector nothing.
        order: node numbers in the order of issue.
        rank: node number -> its place in `order`.
        clocks: which nodes are known to be over when another starts.
        families: by name, the ops that the schedule places.
        defects: what was left aside.
    """

    spec: ScheduleSpec
    table: ModuleTable
    params: Mapping[str, int]
    timeline: Timeline
    nodes: tuple[Node, ...]
    origins: tuple[Origin, ...]
    predecessors: Sequence[Mapping[int, int]]
    order: tuple[int, ...]
    rank: tuple[int, ...]
    clocks: Clocks
    families: Mapping[str, Family]
    defects: Defects

    def edges(self) -> Iterator[tuple[int, int, Origin]]:
        """Every edge as (the node that must be over, the node that starts after it, why), by the latter."""
        for second, before in enumerate(self.predecessors):
            for first, origin in before.items():
                yield first, second, self.origins[origin]

    def is_left_out(self, pieces: range) -> bool:
        """Whether the op with these nodes is one that its module does not need."""
        return self.nodes[pieces[0]].role is Role.LEFT_OUT

    def module(self, kind: Kind, n: int) -> Module:
        """The module that number `n` of an op of `kind` means."""
        order = self.timeline.need if kind is Kind.ALL_GATHER else self.timeline.completion
        return self.table.modules[order[n]]


def successors(predecessors: Sequence[Iterable[int]]) -> list[list[int]]:
    """Node -> the nodes that it is a predecessor of."""
    found: list[list[int]] = [[] for _ in predecessors]
    for second, before in enumerate(predecessors):
        for first in before:
            found[first].append(second)
    return found
