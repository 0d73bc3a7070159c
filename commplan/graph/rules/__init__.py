"""The rules over a graph: each one function with its own code, one file for each family of codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from commplan.errors import Rule, Severity, Violation, sort_violations
from commplan.graph.model import ScheduleGraph
from commplan.graph.ranks import World
from commplan.graph.rules import completeness, dataflow, hints, mesh, order, overlap, ranks, sizes

_RULES: Final = (*order.RULES, *dataflow.RULES, *completeness.RULES, *hints.RULES)

_RULES_OF_RIGHT: Final = (*mesh.RULES, *sizes.RULES, *overlap.RULES)
"""What is worth saying only of a schedule that is right."""

RULES: Final[tuple[Rule, ...]] = tuple(
    sorted((*(rule.doc for rule in (*_RULES, *_RULES_OF_RIGHT)), *ranks.RULES), key=lambda rule: rule.code)
)


def check(graph: ScheduleGraph) -> tuple[Violation, ...]:
    """Every finding in a graph, errors and warnings, by place."""
    found = [violation for rule in _RULES for violation in rule.find(graph)]
    if all(violation.severity is Severity.WARNING for violation in found):
        found += (violation for rule in _RULES_OF_RIGHT for violation in rule.find(graph))
    return sort_violations(found)


def check_ranks(graphs: Iterable[ScheduleGraph], in_flight: int) -> tuple[Violation, ...]:
    """Every finding between ranks, given the graph of each, in their order; none of the graphs may have errors.

    `in_flight` is the number of collectives that a rank can surely have issued and not over at once.
    """
    return sort_violations(ranks.check(World(tuple(graphs)), in_flight))
