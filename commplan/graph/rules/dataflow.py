"""CP201, CP202, CP210: reads. What an op reads must have been written, in every run."""

from __future__ import annotations

from collections.abc import Iterator

from commplan.errors import Related, Rule, Severity, Span, Violation
from commplan.graph.flow import Flow, Read
from commplan.graph.model import Node, Role, ScheduleGraph
from commplan.graph.rules.rule import GraphRule, hook_name, node_name, same_module
from commplan.language.spec import OpLine
from commplan.ops import Kind, When


def unordered_reads(graph: ScheduleGraph) -> Iterator[Violation]:
    """Reads that may come before their write, because nothing orders the two."""
    flow = Flow(graph)
    if flow.unsure_wait:
        return
    for read in _first_of_each_pair(graph, flow):
        if graph.rank[read.writer] > graph.rank[read.reader] or graph.clocks.before(read.writer, read.reader):
            continue
        writer, reader = graph.nodes[read.writer], graph.nodes[read.reader]
        assert isinstance(writer.line, OpLine)
        if reader.role in (Role.COMPUTE, Role.HOOK):
            hint = f"write `- wait: {writer.line.ref.family}_n` in pre_backward"
            told = f"the backward of {_owner(graph, writer)} may start before {writer.op} is complete: compute does not wait"
            yield Violation("CP201", told, writer.line.span, hint)
            continue
        assert isinstance(reader.line, OpLine)
        wanted = same_module(reader.line, writer.line.ref.family)
        yield Violation(
            "CP201",
            f"{reader.op} (lane {reader.lane}) may start before {writer.op} (lane {writer.lane}) is complete: "
            "no `after`, wait, lane or communicator orders them",
            reader.line.span,
            _ordered(reader.line, wanted),
            related=(Related(f"{writer.op}, in {hook_name(graph, writer)}, writes what it reads", writer.line.span),),
        )


def early_reads(graph: ScheduleGraph) -> Iterator[Violation]:
    """Reads that are issued before their write."""
    for read in _first_of_each_pair(graph, Flow(graph)):
        if graph.rank[read.writer] < graph.rank[read.reader]:
            continue
        writer, reader = graph.nodes[read.writer], graph.nodes[read.reader]
        assert isinstance(writer.line, OpLine)
        if reader.role in (Role.COMPUTE, Role.HOOK):
            yield Violation(
                "CP202",
                f"{writer.op} is issued in {hook_name(graph, writer)}, after the backward of {_owner(graph, writer)} has begun",
                writer.line.span,
                f"place {writer.line.ref.family}_<n+1> in pre_backward, with `- wait: {writer.line.ref.family}_n` below it",
            )
            continue
        assert isinstance(reader.line, OpLine)
        wanted = same_module(reader.line, writer.line.ref.family)
        yield Violation(
            "CP202",
            f"{reader.op} is issued in {hook_name(graph, reader)}, before {writer.op} in {hook_name(graph, writer)}, "
            "which writes what it reads",
            reader.line.span,
            f"move this line below {writer.line.ref}, into its hook or a later one, and add {wanted} to its `after`",
            related=(Related(f"{node_name(writer)} is placed here", writer.line.span),),
        )


def _ordered(line: OpLine, wanted: str) -> str:
    if line.after:
        return f"add {wanted} to its `after`"
    return f"add `after: {wanted}` to it" if line.spans else f"write `{line.ref}: {{after: {wanted}}}`"


def _owner(graph: ScheduleGraph, gather: Node) -> str:
    """The first module whose parameters an all-gather brings."""
    assert gather.op is not None
    return graph.module(Kind.ALL_GATHER, gather.op.first).name


def _first_of_each_pair(graph: ScheduleGraph, flow: Flow) -> Iterator[Read]:
    """The first read for each pair of lines that breaks the order; none by lines whose own dependencies are in doubt."""
    known: set[tuple[int, int, bool]] = set()
    for read in flow.reads():
        late = graph.rank[read.writer] > graph.rank[read.reader]
        if not late and graph.clocks.before(read.writer, read.reader):
            continue
        pair = (id(graph.nodes[read.writer].line), id(graph.nodes[read.reader].line), late)
        if pair not in known and pair[1] not in flow.unsure:
            known.add(pair)
            yield read


def reads_of_skipped(graph: ScheduleGraph) -> Iterator[Violation]:
    """Reductions that run in backwards in which the one before them does not."""
    flow = Flow(graph)
    first, second = flow.in_place(Kind.REDUCE_SCATTER), flow.in_place(Kind.ALL_REDUCE)
    if first is None or second is None or first.line.when is When.EVERY or second.line.when is not When.EVERY:
        return
    both = (
        n
        for n, (scatter, reduce) in enumerate(zip(first.pieces, second.pieces, strict=True))
        if not graph.is_left_out(scatter) and not graph.is_left_out(reduce)
    )
    if next(both, None) is None:
        return
    yield Violation(
        "CP210",
        f"{second.line.ref} runs in every backward, {first.line.ref.family} only in the last: in the others there is nothing "
        "to all-reduce",
        second.line.span,
        f"move `when: {When.LAST_BACKWARD}` to {second.line.ref}, or write it there too; then whole gradients are kept between "
        "backwards",
        related=(Related(f"{first.line.ref.family} is skipped here", _when_span(first.line)),),
    )


def _when_span(line: OpLine) -> Span:
    return line.spans.get("when", line.span)


RULES = (
    GraphRule(
        Rule(
            code="CP201",
            title="A read that is not ordered after its write",
            severity=Severity.ERROR,
            what="The data flow of a module is compute, reduce-scatter, all-reduce, apply. Of two neighbours in it, the later "
            "may start before the earlier is complete: no `after`, wait, lane or communicator orders the two.",
            why="The gradients are right as long as the earlier op happens to be quick, and silently wrong when it is not.",
            wrong="""\
version: 1
name: hopeful
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: hopeful
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        unordered_reads,
    ),
    GraphRule(
        Rule(
            code="CP202",
            title="A read that is issued before its write",
            severity=Severity.ERROR,
            what="Of two neighbours in the data flow of a module, the later is issued first.",
            why="It reads what is not there yet: unreduced gradients, or parameters that have not been gathered.",
            wrong="""\
version: 1
name: backwards
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - apply_<n-1>: {after: RS_<n-1>}
  - AR_<n-1>: {after: RS_<n-1>}
""",
            right="""\
version: 1
name: backwards
post_backward:
  - wait: RS_<n-1>
  - apply_<n-2>: {after: AR_<n-2>}
  - RS_n: {after: compute_n}
  - AR_<n-1>: {after: RS_<n-1>}
""",
        ),
        early_reads,
    ),
    GraphRule(
        Rule(
            code="CP210",
            title="A reduction that runs where the one before it is skipped",
            severity=Severity.ERROR,
            what="The reduce-scatter is limited to the last backward of an accumulated step, the all-reduce is not.",
            why="In the other backwards there is no gradient shard for it to reduce.",
            wrong="""\
version: 1
name: nothing_to_reduce
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n, when: last_backward}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: nothing_to_reduce
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n, when: last_backward}
root:
  - apply_n: {after: AR_n}
""",
        ),
        reads_of_skipped,
    ),
)
