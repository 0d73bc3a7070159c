"""CP203 to CP209, CP211: every gradient is reduced over each axis and applied, once, where that may happen."""

from __future__ import annotations

from collections.abc import Iterator

from commplan.errors import Related, Rule, Severity, Violation
from commplan.graph.flow import GRADIENT_KINDS, Flow, may_hold, needed_axes, op_lines
from commplan.graph.model import ScheduleGraph
from commplan.graph.rules.rule import GraphRule
from commplan.language.spec import OpLine
from commplan.ops import TRAITS, Axis, Kind, Section

_REDUCES = {Axis.SHARD: Kind.REDUCE_SCATTER, Axis.REPLICATE: Kind.ALL_REDUCE}


def never_reduced(graph: ScheduleGraph) -> Iterator[Violation]:
    """Axes over which no op reduces a module that is spread over them."""
    flow = Flow(graph)
    if _places_nothing(flow):
        return
    for axis, kind in _REDUCES.items():
        concerned = (n for n in range(len(graph.timeline.completion)) if axis in needed_axes(graph, n))
        first = next(concerned, None)
        if first is None or flow.families(kind):
            continue
        family = TRAITS[kind].family
        readers = [f.line for later in GRADIENT_KINDS[GRADIENT_KINDS.index(kind) + 1 :] for f in flow.families(later)]
        yield Violation(
            "CP203",
            f"the gradients of module {first} ({graph.module(Kind.COMPUTE, first).name}) are never reduced over the {axis} "
            f"axis: no line places {_article(kind)}",
            readers[0].span if readers else graph.spec.name_span,
            f"place `- {family}_n: {{after: {'compute_n' if kind is Kind.REDUCE_SCATTER else 'RS_n'}}}` in post_backward"
            + (f", and let {readers[0].ref.family} wait for it" if readers else ""),
        )


def reduced_twice(graph: ScheduleGraph) -> Iterator[Violation]:
    """Two lines that reduce the same gradients over the same axis."""
    yield from _twice(
        graph, "CP204", (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE), "the gradients of every module are reduced over the {axis} axis"
    )


def never_applied(graph: ScheduleGraph) -> Iterator[Violation]:
    """Reduced gradients that never become `.grad`."""
    flow = Flow(graph)
    if flow.families(Kind.APPLY) or _places_nothing(flow) or not graph.timeline.completion:
        return
    last = [f.line for kind in GRADIENT_KINDS for f in flow.families(kind)][-1]
    yield Violation(
        "CP205",
        f"the gradients of module 0 ({graph.module(Kind.COMPUTE, 0).name}) never reach `.grad`: no line places an apply",
        last.span,
        f"place `- apply_n: {{after: {last.ref.family}_n}}` in root",
    )


def applied_twice(graph: ScheduleGraph) -> Iterator[Violation]:
    """Two lines that apply the same gradients."""
    yield from _twice(graph, "CP206", (Kind.APPLY,), "the gradients of every module are applied")


def wrong_hook(graph: ScheduleGraph) -> Iterator[Violation]:
    """Ops in a hook that may not place them."""
    for section, line in op_lines(graph):
        if may_hold(section, line, graph):
            continue
        offset = line.ref.index.distance
        bound = f" (with {offset.param} = {offset.resolve(graph.params)})" if offset.param is not None else ""
        yield Violation(
            "CP207", f"{line.ref}{bound} cannot be placed in {section}: {_why(section, line)}", line.span, _where(section, line)
        )


def _why(section: Section, line: OpLine) -> str:
    if line.kind is Kind.ALL_GATHER and section is Section.POST_BACKWARD:
        return "parameters are gathered before a backward, not after it"
    if line.kind is Kind.ALL_GATHER:
        return "the compute that needs its parameters has begun by then"
    if section is Section.PRE_BACKWARD:
        return "only the gradients of modules before n are complete then"
    return "only the gradients of modules up to n are complete then"


def _where(section: Section, line: OpLine) -> str:
    family, index = line.ref.family, line.ref.index
    if line.kind is Kind.ALL_GATHER:
        return f"place {family}_<n+1> in pre_backward, with `- wait: {family}_n` below it"
    if section is Section.POST_BACKWARD:
        return f"write {family}_n, and n in its `after` too, or name an earlier module"
    if index.distance.param is not None and index.sign < 0:
        return f"write `min: 1` for {index.distance.param} in `params`"
    return f"write {family}_<n-1>, or place {family}_n in post_backward"


def wrong_axis(graph: ScheduleGraph) -> Iterator[Violation]:
    """Ops over an axis that is not that of their kind."""
    for _, line in op_lines(graph):
        own = TRAITS[line.kind].axis
        if line.axis is not own:
            wrong = f"{line.ref} is {_article(line.kind)} over {'the ' + line.axis + ' axis' if line.axis else 'no axis'}"
            right = f"over the {own} axis" if own else "on no axis"
            span = line.spans.get("axis", line.span)
            yield Violation(
                "CP208", f"{wrong}: its kind runs {right}", span, f"write `axis: {own}`" if own else "take `axis` away"
            )


def gathered_twice(graph: ScheduleGraph) -> Iterator[Violation]:
    """Two lines that gather the same parameters."""
    yield from _twice(graph, "CP209", (Kind.ALL_GATHER,), "the parameters of every module are gathered")


def no_op(graph: ScheduleGraph) -> Iterator[Violation]:
    """Schedules that place no op on gradients at all."""
    if _places_nothing(Flow(graph)) and graph.timeline.completion:
        yield Violation(
            "CP211",
            f"module 0 ({graph.module(Kind.COMPUTE, 0).name}) has no op: no line reduces or applies gradients",
            graph.spec.name_span,
            "place `- RS_n: {after: compute_n}` and `- AR_n: {after: RS_n}` in post_backward, and "
            "`- apply_n: {after: AR_n}` in root",
        )


def _twice(graph: ScheduleGraph, code: str, kinds: tuple[Kind, ...], done: str) -> Iterator[Violation]:
    flow = Flow(graph)
    pairs = [(line, first) for line, first in graph.defects.repeated if line.kind in kinds]
    for kind in kinds:
        lines = [family.line for family in flow.families(kind)]
        pairs += [(line, lines[0]) for line in lines[1:]]
    for line, first in pairs:
        other = f"{first.ref}" if str(first.ref) != str(line.ref) else f"the one in line {first.span.line}"
        yield Violation(
            code,
            f"{done.format(axis=line.axis)} twice: by {line.ref} here and by {other}",
            line.span,
            f"remove this line, or line {first.span.line}",
            related=(Related(f"{first.ref} is placed here first", first.span),),
        )


def _places_nothing(flow: Flow) -> bool:
    return not any(flow.families(kind) for kind in GRADIENT_KINDS)


def _article(kind: Kind) -> str:
    return f"{'an' if kind.value[0] == 'a' else 'a'} {kind}"


RULES = (
    GraphRule(
        Rule(
            code="CP203",
            title="Gradients that are never reduced over an axis",
            severity=Severity.ERROR,
            what="A module is spread over a mesh axis, and no line of the schedule reduces its gradients over it.",
            why="Each rank would apply gradients that lack the contributions of others. Training goes on, and diverges.",
            wrong="""\
version: 1
name: no_all_reduce
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
root:
  - apply_n: {after: RS_n}
""",
            right="""\
version: 1
name: no_all_reduce
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        never_reduced,
    ),
    GraphRule(
        Rule(
            code="CP204",
            title="Gradients that are reduced twice",
            severity=Severity.ERROR,
            what="Two lines reduce the gradients of every module over the same axis.",
            why="The second reduction adds up what is summed already: gradients come out too large, or time is wasted.",
            wrong="""\
version: 1
name: two_reductions
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - AR_n: {after: RS_n}
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: two_reductions
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        reduced_twice,
    ),
    GraphRule(
        Rule(
            code="CP205",
            title="Gradients that are never applied",
            severity=Severity.ERROR,
            what="No line places an apply, the op that turns a reduced shard into `.grad`.",
            why="The optimizer would find no gradients.",
            wrong="""\
version: 1
name: no_apply
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
""",
            right="""\
version: 1
name: no_apply
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        never_applied,
    ),
    GraphRule(
        Rule(
            code="CP206",
            title="Gradients that are applied twice",
            severity=Severity.ERROR,
            what="Two lines apply the gradients of every module.",
            why="Apply accumulates into `.grad`: gradients come out twice as large.",
            wrong="""\
version: 1
name: two_applies
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
  - apply_<n-1>: {after: AR_<n-1>}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: two_applies
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        applied_twice,
    ),
    GraphRule(
        Rule(
            code="CP207",
            title="An op in a hook that may not place it",
            severity=Severity.ERROR,
            what="pre_backward may place AG of modules whose compute has not begun, and RS, AR and apply of modules before n; "
            "post_backward may place RS, AR and apply of modules up to n; root may place everything.",
            why="The gradients that the op works on do not exist yet, or parameters are gathered after their use.",
            wrong="""\
version: 1
name: ahead
post_backward:
  - wait: RS_<n-1>
  - RS_<n+1>: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: ahead
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        wrong_hook,
    ),
    GraphRule(
        Rule(
            code="CP208",
            title="An op over an axis that is not that of its kind",
            severity=Severity.ERROR,
            what="All-gather and reduce-scatter run over the shard axis, all-reduce over the replicate axis.",
            why="Gradients would be reduced over one axis twice and over the other not at all.",
            wrong="""\
version: 1
name: other_axis
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - sum_n: {kind: all_reduce, axis: shard, after: RS_n}
root:
  - apply_n: {after: sum_n}
""",
            right="""\
version: 1
name: other_axis
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - sum_n: {kind: all_reduce, axis: replicate, after: RS_n}
root:
  - apply_n: {after: sum_n}
""",
        ),
        wrong_axis,
    ),
    GraphRule(
        Rule(
            code="CP209",
            title="Parameters that are gathered twice",
            severity=Severity.ERROR,
            what="Two lines gather the parameters of every module.",
            why="The second gathering costs time and memory and brings nothing.",
            wrong="""\
version: 1
name: two_gatherings
pre_backward:
  - AG_<n+1>
  - again_<n+1>: {kind: all_gather}
  - wait: [AG_n, again_n]
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
            right="""\
version: 1
name: two_gatherings
pre_backward:
  - AG_<n+1>
  - wait: AG_n
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        gathered_twice,
    ),
    GraphRule(
        Rule(
            code="CP211",
            title="A module without an op",
            severity=Severity.ERROR,
            what="The schedule neither reduces nor applies the gradients of any module.",
            why="The optimizer would find no gradients.",
            wrong="""\
version: 1
name: only_gathering
pre_backward:
  - AG_<n+1>
  - wait: AG_n
""",
            right="""\
version: 1
name: only_gathering
pre_backward:
  - AG_<n+1>
  - wait: AG_n
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        ),
        no_op,
    ),
)
