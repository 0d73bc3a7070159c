"""The rules over a graph: each one function with its own code, one file for each family of codes."""

from __future__ import annotations

from typing import Final

from commplan.errors import Rule, Violation, sort_violations
from commplan.graph.model import ScheduleGraph
from commplan.graph.rules import completeness, dataflow, hints, order

_RULES: Final = tuple(
    sorted((*order.RULES, *dataflow.RULES, *completeness.RULES, *hints.RULES), key=lambda rule: rule.doc.code)
)

RULES: Final[tuple[Rule, ...]] = tuple(rule.doc for rule in _RULES)


def check(graph: ScheduleGraph) -> tuple[Violation, ...]:
    """Every finding in a graph, errors and warnings, by place."""
    return sort_violations(violation for rule in _RULES for violation in rule.find(graph))
