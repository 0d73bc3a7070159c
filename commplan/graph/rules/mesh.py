"""CP304: the mesh. An op over an axis that no module has."""

from __future__ import annotations

from collections.abc import Iterator

from commplan.errors import Rule, Severity, Violation
from commplan.graph.model import ScheduleGraph
from commplan.graph.rules.rule import GraphRule
from commplan.language.spec import OpLine
from commplan.ops import Kind


def missing_axis(graph: ScheduleGraph) -> Iterator[Violation]:
    """Lines whose op is left out of every module, because none is spread over its axis."""
    for family in graph.families.values():
        line = family.line
        order = graph.timeline.need if line.kind is Kind.ALL_GATHER else graph.timeline.completion
        if line.axis is None or not order or any(line.axis in graph.table.modules[i].axes for i in order):
            continue
        yield Violation(
            "CP304",
            f"{line.ref} never runs: no module is spread over the {line.axis} axis",
            line.span,
            f"remove this line and let {_waits(line)}, or shard the model over a mesh with a {line.axis} axis",
            severity=Severity.WARNING,
        )


def _waits(line: OpLine) -> str:
    instead = " and ".join(str(ref) for ref in line.after)
    return f"what waits for it wait for {instead}" if instead else "nothing wait for it"


RULES = (
    GraphRule(
        Rule(
            code="CP304",
            title="An axis that the mesh lacks",
            severity=Severity.WARNING,
            what="The schedule places an op over a mesh axis that no module of the table has. The op is left out of every "
            "module, and what waits for it waits for what it would have waited for.",
            why="The gradients are right. But a schedule for two axes on a mesh of one is often a mesh that was meant to be "
            "another: training then runs without replicas.",
            wrong="""\
# modules: embed (shard), head (shard)
version: 1
name: no_replicas
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
# modules: embed (shard), head (shard)
version: 1
name: no_replicas
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
root:
  - apply_n: {after: RS_n}
""",
        ),
        missing_axis,
    ),
)
