"""What a rule over the graph is, and how findings name things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from commplan.errors import Rule, Violation
from commplan.graph.model import Node, Role, ScheduleGraph
from commplan.language.spec import Line, OpLine, OpRef
from commplan.ops import Section


@dataclass(frozen=True, slots=True)
class GraphRule:
    """A rule: its documentation, and the function that finds where a graph breaks it."""

    doc: Rule
    find: Callable[[ScheduleGraph], Iterator[Violation]]


def references(line: Line) -> tuple[OpRef, ...]:
    """The ops that a line waits for."""
    return line.after if isinstance(line, OpLine) else line.refs


def node_name(node: Node) -> str:
    """What to call a node: its op, or "compute" for a wait, which is what compute does."""
    if node.role is Role.ALL:
        assert isinstance(node.line, OpLine)
        return f"{node.line.ref.family}_*"
    return "compute" if node.op is None else str(node.op)


def hook_name(graph: ScheduleGraph, node: Node) -> str:
    """What to call the hook that a node is issued in."""
    point = graph.timeline.points[node.hook]
    return "root" if point.section is Section.ROOT else f"{point.section} {point.n}"


def same_module(line: OpLine, family: str) -> str:
    """How `line` would name the op of another family for its own module."""
    return f"{family}_{line.ref.index}"
