"""The rules: each one function with its own code, one file for each family of codes."""

from __future__ import annotations

from commplan.errors import Rule, Violation
from commplan.graph.model import ScheduleGraph

RULES: tuple[Rule, ...] = ()


def check(graph: ScheduleGraph) -> tuple[Violation, ...]:
    """Every finding in a graph, by place."""
    return ()
