"""CP1xx: order. What waits for what must be possible in the order of issue."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from commplan.errors import Related, Rule, Severity, Violation
from commplan.graph.flow import may_hold, op_lines
from commplan.graph.model import LateReference, Node, Role, ScheduleGraph
from commplan.graph.rules.rule import GraphRule, hook_name, node_name
from commplan.language.spec import OpLine
from commplan.ops import KIND_OF_FAMILY, Kind, Section

_SHORT_CHARS: Final = 3
"""Names up to this length are close when half of them agrees."""


def cycles(graph: ScheduleGraph) -> Iterator[Violation]:
    """Ops that wait for each other in a circle."""
    for cycle in graph.defects.cycles:
        nodes = [graph.nodes[number] for number in cycle]
        backwards = [nodes[0], *reversed(nodes[1:]), nodes[0]]
        names = [node_name(node) for node in backwards]
        told = (
            f"{names[0]} waits for itself"
            if len(nodes) == 1
            else f"{names[0]} waits for {', which waits for '.join(names[1:])}"
        )
        line = nodes[0].line
        assert line is not None
        yield Violation(
            "CP101",
            f"a cycle: {told}",
            line.span,
            "none of these can ever start: take one of the `after` away",
            related=tuple(_links(backwards)),
        )


def _links(backwards: list[Node]) -> Iterator[Related]:
    for waiting, waited_for in pairwise(backwards):
        if waiting.role is Role.ALL or not isinstance(waiting.line, OpLine):
            continue
        for ref in waiting.line.after:
            family = waited_for.line.ref.family if isinstance(waited_for.line, OpLine) else ""
            if ref.family == family:
                yield Related(f"{node_name(waiting)} waits for {node_name(waited_for)}", ref.span)
                break


def late_references(graph: ScheduleGraph) -> Iterator[Violation]:
    """Dependencies on ops that are issued in a later hook; not those of lines that stand in a wrong hook themselves."""
    stray = {id(line) for section, line in op_lines(graph) if not may_hold(section, line, graph)}
    for late in graph.defects.late:
        node, target = graph.nodes[late.node], graph.nodes[late.target]
        if id(node.line) in stray or id(target.line) in stray:
            continue
        name, wanted = node_name(node), node_name(target)
        here, there = hook_name(graph, node), hook_name(graph, target)
        when = f"over only when {there} opens" if target.role is Role.COMPUTE else f"issued only in {there}"
        yield Violation(
            "CP102",
            f"{name} waits in {here} for {wanted}, which is {when}",
            late.ref.span,
            _hint(late, graph),
            related=(Related(f"{wanted} is placed here", target.line.span),) if target.line is not None else (),
        )


def _hint(late: LateReference, graph: ScheduleGraph) -> str:
    target, section = graph.nodes[late.target], graph.timeline.points[graph.nodes[late.node].hook].section
    if target.op is not None and target.op.first != target.op.last:
        return f"{target.op} runs in the hook of its last member: name a module that far back, or take `fuse` away"
    if target.role is Role.COMPUTE:
        known = "<n-1> in pre_backward" if section is Section.PRE_BACKWARD else "n in post_backward"
        return f"name the compute of a module that is complete by then, as compute_{known}"
    if late.ref.index.every:
        return f"write {late.ref} in root, where every {late.ref.family} has been issued"
    told = f"name a module whose {late.ref.family} is issued by then"
    line = graph.nodes[late.node].line
    if isinstance(line, OpLine) and line.kind is Kind.ALL_GATHER:
        return told
    return f"{told}, or place this line in a later hook (root is the last)"


def unknown_references(graph: ScheduleGraph) -> Iterator[Violation]:
    """References to ops that no line places."""
    for _, ref in graph.defects.unknown:
        known = [*graph.families, "compute"]
        close = [name for name in known if name.lower() == ref.family.lower()]
        if ref.family not in KIND_OF_FAMILY:
            close += difflib.get_close_matches(ref.family, known, n=1, cutoff=0.5 if len(ref.family) <= _SHORT_CHARS else 0.7)
        hint = f"did you mean {close[0]}_{ref.index}?" if close else ""
        if not hint and ref.family == "AG":
            hint = "without AG in the file FSDP2 gathers parameters by itself: take this away, or place AG_n in pre_backward"
        elif not hint:
            hint = (
                f"place it, as in `- {ref.family}_n`, or take this away" if ref.family in KIND_OF_FAMILY else "take this away"
            )
        yield Violation("CP103", f"{ref} never runs: no line places {ref.family}", ref.span, hint)


RULES = (
    GraphRule(
        Rule(
            code="CP101",
            title="Ops wait for each other in a circle",
            severity=Severity.ERROR,
            what="The `after` of some ops of one hook leads back to where it began. The finding shows the whole circle, from "
            "the member that is written first.",
            why="No op of the circle can start, so backward would never end.",
            wrong="""\
version: 1
name: circle
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: [compute_n, AR_n]}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: circle
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        cycles,
    ),
    GraphRule(
        Rule(
            code="CP102",
            title="A dependency on an op that is issued later",
            severity=Severity.ERROR,
            what="An op or a wait names an op that is issued in a later hook.",
            why="Ops are issued hook by hook. A wait for something that has not been issued would never end.",
            wrong="""\
version: 1
name: too_soon
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_<n-1>: {after: RS_<n-1>}
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: too_soon
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_<n-1>: {after: RS_<n-1>}
root:
  - apply_n: {after: AR_n}
""",
        ),
        late_references,
    ),
    GraphRule(
        Rule(
            code="CP103",
            title="A reference to an op that never runs",
            severity=Severity.ERROR,
            what="An `after` or a wait names an op that no line of the schedule places.",
            why="It is a slip of the pen, and the order that it was meant to bring about is missing.",
            wrong="""\
version: 1
name: slip
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: ARR_n}
""",
            right="""\
version: 1
name: slip
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        unknown_references,
    ),
)
