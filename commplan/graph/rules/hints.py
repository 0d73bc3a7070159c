"""CP501: hints on how a schedule is written."""

from __future__ import annotations

from collections.abc import Iterator

from commplan.errors import Related, Rule, Severity, Violation
from commplan.graph.model import Node, Role, ScheduleGraph
from commplan.graph.place import HOOK_LINES
from commplan.graph.rules.rule import GraphRule
from commplan.language.spec import OpLine


def out_of_order(graph: ScheduleGraph) -> Iterator[Violation]:
    """Lines that stand above a line of their hook that they wait for."""
    known: set[tuple[int, int]] = set()
    for first, second, origin in graph.edges():
        ref = origin.ref
        earlier, later = graph.nodes[first], graph.nodes[second]
        if ref is None or not isinstance(earlier.line, OpLine) or later.line is None or not _written_later(earlier, later):
            continue
        pair = (id(earlier.line), id(later.line))
        if pair in known:
            continue
        known.add(pair)
        what = later.line.ref if isinstance(later.line, OpLine) else "this wait"
        yield Violation(
            "CP501",
            f"{earlier.line.ref} is written below {what}, and issued before it",
            later.line.span,
            f"move this line below {earlier.line.ref}: a file in the order of issue is easier to read",
            severity=Severity.WARNING,
            related=(Related(f"{earlier.line.ref} is placed here", earlier.line.span),),
        )


def _written_later(earlier: Node, later: Node) -> bool:
    """Whether the file has the line of `earlier` below that of `later`, in one hook, real or imagined."""
    same_hook = earlier.hook == later.hook and earlier.key[0] == later.key[0]
    if not same_hook or Role.ALL in (earlier.role, later.role):
        return False
    if earlier.key[0] == HOOK_LINES and earlier.key[1] != later.key[1]:
        return False
    return earlier.line is not later.line and earlier.key > later.key


RULES = (
    GraphRule(
        Rule(
            code="CP501",
            title="Lines that are not written in the order of issue",
            severity=Severity.WARNING,
            what="A line of a hook waits for an op that is placed below it in the same hook. That op is issued first.",
            why="It runs as it should, but whoever reads the file has to sort it in the head.",
            wrong="""\
version: 1
name: upside_down
post_backward:
  - wait: RS_<n-1>
  - AR_n: {after: RS_n}
  - RS_n: {after: compute_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: upside_down
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        out_of_order,
    ),
)
