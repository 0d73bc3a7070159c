"""CP1xx: order. What waits for what must be possible in the order of issue."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from commplan.errors import Related, Rule, Severity, Violation
from commplan.graph.flow import GRADIENT_KINDS, may_hold, op_lines
from commplan.graph.model import LateReference, Node, Role, ScheduleGraph
from commplan.graph.rules.rule import GraphRule, hook_name, node_name
from commplan.language.spec import OpLine, OpRef
from commplan.ops import KIND_OF_FAMILY, Kind, OpId, Section

_SHORT_CHARS: Final = 3
"""Names up to this length are close when half of them agrees."""

FLOW: Final = (Kind.ALL_GATHER, Kind.COMPUTE, *GRADIENT_KINDS)
"""The data flow of a module."""


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
            _cut(backwards),
            related=tuple(_notes(backwards)),
        )


def _links(backwards: list[Node]) -> Iterator[tuple[OpLine, OpRef, Node, Node]]:
    """What is written of a circle: a line, what it names, and the two ops, the one that waits first."""
    for waiting, waited_for in pairwise(backwards):
        if waiting.role is Role.ALL or not isinstance(waiting.line, OpLine):
            continue
        family = waited_for.line.ref.family if isinstance(waited_for.line, OpLine) else ""
        ref = next((ref for ref in waiting.line.after if ref.family == family), None)
        if ref is not None:
            yield waiting.line, ref, waiting, waited_for


def _notes(backwards: list[Node]) -> Iterator[Related]:
    for _, ref, waiting, waited_for in _links(backwards):
        yield Related(f"{node_name(waiting)} waits for {node_name(waited_for)}", ref.span)


def _cut(backwards: list[Node]) -> str:
    """Where to cut a circle: where an op waits for one that comes no earlier in the data flow; each circle has such a place."""
    links = list(_links(backwards))
    against = (
        (line, ref)
        for line, ref, _, other in links
        if isinstance(other.line, OpLine) and FLOW.index(line.kind) <= FLOW.index(other.line.kind)
    )
    line, ref = next(against, links[0][:2])
    return f"none of these can ever start: take {ref} out of the `after` of {line.ref} in line {line.span.line}"


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
    """What to write instead: where the line reads what it names, the same of earlier modules; else the name of one that far
    back; or the same line in root, where everything has been issued.
    """
    node, target, ref = graph.nodes[late.node], graph.nodes[late.target], late.ref
    line, family = node.line, ref.family
    gathers = isinstance(line, OpLine) and line.kind is Kind.ALL_GATHER
    if target.op is not None and target.op.first != target.op.last:
        return _of_bucket(late, graph, target.op)
    if ref.index.every or graph.timeline.points[target.hook].section is Section.ROOT:
        there = "has been issued" if ref.index.every else "is issued"
        return f"take {ref} away" if gathers else f"move this line to root, where every {family} {there}"
    hooks = graph.timeline.pre if target.role is Role.OP and _gathers(target) else graph.timeline.post
    back = sum(node.hook < hook <= target.hook for hook in hooks)
    if ref.index.distance.param is not None:
        return f"name a module that is {back} further back than {ref}"
    earlier = _back(ref, back, graph)
    if target.role is not Role.COMPUTE and isinstance(line, OpLine) and _reads(line, ref, target, graph):
        return f"name {line.ref.family}_{earlier} and {family}_{earlier} in this line, or move it to root"
    return f"write {family}_{earlier}, which is {'over' if target.role is Role.COMPUTE else 'issued'} by then"


def _of_bucket(late: LateReference, graph: ScheduleGraph, op: OpId) -> str:
    line, target, ref = graph.nodes[late.node].line, graph.nodes[late.target].line, late.ref
    assert isinstance(target, OpLine)
    why = f"{op} runs in the hook of its last member"
    if isinstance(line, OpLine) and _reads(line, ref, graph.nodes[late.target], graph):
        other = "move this line to root" if line.kind is Kind.APPLY else f"give {line.ref} the same `fuse`"
        return f"{why}: {other}, or take `fuse` away from {target.ref}"
    if ref.index.every or ref.index.distance.param is not None:
        return f"{why}: name a module that far back, or take `fuse` away"
    return f"{why}: write {ref.family}_{_back(ref, op.last - op.first, graph)}, or take `fuse` away from {target.ref}"


def _back(ref: OpRef, distance: int, graph: ScheduleGraph) -> str:
    """The index of a module that is `distance` further back than that of `ref`."""
    offset = ref.index.offset(graph.params) - distance
    return f"<n{offset:+d}>" if offset else "n"


def _gathers(node: Node) -> bool:
    return isinstance(node.line, OpLine) and node.line.kind is Kind.ALL_GATHER


def _reads(line: OpLine, ref: OpRef, target: Node, graph: ScheduleGraph) -> bool:
    """Whether `line` names in `ref` what comes before it in the data flow of its own module."""
    own = not ref.index.every and ref.index.offset(graph.params) == line.ref.index.offset(graph.params)
    return own and isinstance(target.line, OpLine) and FLOW.index(target.line.kind) < FLOW.index(line.kind)


def unknown_references(graph: ScheduleGraph) -> Iterator[Violation]:
    """References to ops that no line places."""
    for _, ref in graph.defects.unknown:
        known = [*graph.families, "compute"]
        close = [name for name in known if name.lower() == ref.family.lower()]
        if ref.family not in KIND_OF_FAMILY:
            close += difflib.get_close_matches(ref.family, known, n=1, cutoff=0.5 if len(ref.family) <= _SHORT_CHARS else 0.7)
        hint = f"did you mean {close[0]}_{ref.index}?" if close else ""
        if not hint and ref.family == "AG":
            hint = (
                "without AG in the file FSDP2 gathers parameters by itself: take this away, or place AG_<n+1> in pre_backward"
            )
        elif not hint:
            hint = (
                f"place it, as in `- {ref.family}_n`, or take this away"
                if ref.family in KIND_OF_FAMILY
                else f"take {ref} away, or place an op of that name, with its `kind`"
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
