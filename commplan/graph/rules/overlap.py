"""CP502 to CP504: hints on what no compute hides, where another place of the line surely would."""

from __future__ import annotations

from collections.abc import Iterator

from commplan.errors import Related, Rule, Severity, Violation
from commplan.graph.flow import op_lines
from commplan.graph.model import Node, Role, ScheduleGraph
from commplan.graph.place import HOOK_LINES
from commplan.graph.rules.rule import GraphRule, hook_name
from commplan.language.spec import OpLine, OpRef
from commplan.ops import COMPUTE_LANE, Kind, Section

_REDUCTIONS = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


def stalls(graph: ScheduleGraph) -> Iterator[Violation]:
    """Waits of compute, and ops on its lane, for a collective that was issued in the same hook, with more compute to come."""
    known: set[tuple[int, int]] = set()
    last_compute = graph.timeline.post[-1] if graph.timeline.post else 0
    for first, second, origin in graph.edges():
        ref = origin.ref
        op, waiting = graph.nodes[first], graph.nodes[second]
        pair = (id(op.line), id(waiting.line))
        if ref is None or pair in known or waiting.hook >= last_compute or not _stalls(op, waiting):
            continue
        known.add(pair)
        assert isinstance(op.line, OpLine)
        assert waiting.line is not None
        who = f"compute, which {waiting.op} runs on," if waiting.op is not None else "compute"
        yield Violation(
            "CP502",
            f"{who} waits in {hook_name(graph, waiting)} for {op.op}, issued in that hook: nothing hides it",
            waiting.line.span,
            _later(graph, op.line, waiting, ref),
            severity=Severity.WARNING,
            related=(Related(f"{op.op} is issued here", op.line.span),),
        )


def _stalls(op: Node, waiting: Node) -> bool:
    """Whether compute stands still for the whole length of `op`. Imagined hooks before the first are no fault of the author."""
    together = op.hook == waiting.hook and op.key[:2] == waiting.key[:2] and op.key[0] == HOOK_LINES and op.key[1] >= 0
    is_collective = op.role is Role.OP and isinstance(op.line, OpLine) and op.line.axis is not None
    return together and is_collective and waiting.role in (Role.WAIT, Role.OP) and waiting.lane == COMPUTE_LANE


def _later(graph: ScheduleGraph, line: OpLine, waiting: Node, ref: OpRef) -> str:
    if line.kind is Kind.ALL_GATHER:
        return f"write `- {line.ref.family}_<n+1>`, a module ahead, with `- wait: {line.ref.family}_n` below it"
    earlier = f"<n{ref.index.offset(graph.params) - 1:+d}>"
    if isinstance(waiting.line, OpLine):
        family = waiting.line.ref.family
        return f"write `{family}_{earlier}: {{after: {ref.family}_{earlier}}}`: then it runs while the next module computes"
    return f"write `- wait: {ref.family}_{earlier}`: then it runs while the next module computes"


def hides_nothing(graph: ScheduleGraph) -> Iterator[Violation]:
    """Reductions that stand in root, behind all compute."""
    last = len(graph.timeline.completion) - 1
    for section, line in op_lines(graph):
        if section is not Section.ROOT or line.kind not in _REDUCTIONS or graph.families[line.ref.family].line is not line:
            continue
        if all(map(graph.is_left_out, graph.families[line.ref.family].pieces[:last])):
            continue
        yield Violation(
            "CP503",
            f"{line.ref} is issued in root, when all compute is over: nothing hides it",
            line.span,
            "move this line to the end of post_backward: there the backward of later modules hides it",
            severity=Severity.WARNING,
        )


def long_tail(graph: ScheduleGraph) -> Iterator[Violation]:
    """Reductions in buckets up to the last module, which all wait for the last gradients."""
    for section, line in op_lines(graph):
        family = graph.families[line.ref.family]
        if section is Section.ROOT or family.line is not line or line.fuse is None or line.kind not in _REDUCTIONS:
            continue
        last = graph.nodes[family.pieces[-1][0]].op if family.pieces else None
        if last is None or last.first == last.last or line.fuse.tail.resolve(graph.params):
            continue
        yield Violation(
            "CP504",
            f"{last} starts only when the last gradients are complete: nothing hides a whole bucket",
            line.spans.get("fuse", line.span),
            "add `tail: 1` to `fuse`: then the modules before the last are sent while it computes",
            severity=Severity.WARNING,
        )


RULES = (
    GraphRule(
        Rule(
            code="CP502",
            title="Compute waits for an op that was just issued",
            severity=Severity.WARNING,
            what="In a hook with more compute to come, compute waits (or runs an op that waits) for a collective that was "
            "issued in the same hook.",
            why="Compute stands still for the whole length of the collective. One hook later it would have run beside the "
            "backward of a module, at the price of one more buffer. In a schedule for debugging that may be what you want.",
            wrong="""\
version: 1
name: impatient
post_backward:
  - RS_n: {after: compute_n}
  - wait: RS_n
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: impatient
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        stalls,
    ),
    GraphRule(
        Rule(
            code="CP503",
            title="An op that hides nothing behind compute",
            severity=Severity.WARNING,
            what="A reduce-scatter or an all-reduce of every module is placed in root.",
            why="Root opens when all compute is over, so the whole of it adds to the step.",
            wrong="""\
version: 1
name: afterwards
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
root:
  - AR_n: {after: RS_n}
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: afterwards
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        hides_nothing,
    ),
    GraphRule(
        Rule(
            code="CP504",
            title="A long tail",
            severity=Severity.WARNING,
            what="Modules are fused into buckets up to the very last one.",
            why="A bucket starts when its last member is complete. The one that holds the last module starts when no compute "
            "is left, and adds its whole length to the step.",
            wrong="""\
version: 1
name: whole_buckets
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n, fuse: {modules: 4}}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: whole_buckets
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n, fuse: {modules: 4, tail: 1}}
root:
  - apply_n: {after: AR_n}
""",
        ),
        long_tail,
    ),
)
