"""CP401, CP402: memory. What a plan keeps alive, against a cap and against the number of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commplan.errors import Rule, Severity, Span, Violation
from commplan.ops import TRAITS, Kind, Section
from commplan.plan.model import COMMUNICATION, Backwards, Buffer, BufferKind, OpStep, Plan
from commplan.plan.peak import Makers, Peak, Share, is_partial_sum, peak
from commplan.plan.text import moment, size

_NAMES: Final = {
    BufferKind.GRADIENT: ("unsharded gradient", "unsharded gradients"),
    BufferKind.RS_INPUT: ("reduce-scatter input", "reduce-scatter inputs"),
    BufferKind.SHARD: ("reduced shard", "reduced shards"),
    BufferKind.PARTIAL: ("partial sum across microbatches", "partial sums across microbatches"),
    BufferKind.WIRE: ("wire copy", "wire copies"),
}
"""One, and several."""

WHOLE_GRADIENTS: Final = (BufferKind.GRADIENT, BufferKind.RS_INPUT)
"""Buffers as large as a module's gradients before they are sharded."""


def over_cap(plan: Plan, cap_bytes: int) -> Iterator[Violation]:
    """A peak above `cap_bytes`."""
    top = peak(plan)
    if top.size_bytes <= cap_bytes:
        return
    place = moment(top.hook, top.backwards)
    parts = "; ".join(f"{_counted(share)} on lane {share.lane} {size(share.size_bytes)}" for share in top.shares)
    yield Violation(
        "CP401",
        f"communication memory peaks in {place} at {size(top.size_bytes)} ({top.size_bytes:,} bytes), "
        f"over the cap of {size(cap_bytes)} ({cap_bytes:,} bytes): {parts}",
        _span(Makers.of(plan).cause(top.shares[0].buffers[-1])),
        _remedy(plan, top, cap_bytes),
    )


def _counted(share: Share) -> str:
    num = len(share.buffers)
    return f"{num} {_NAMES[share.kind][num != 1]}"


def _remedy(plan: Plan, top: Peak, cap_bytes: int) -> str:
    share = top.shares[0]
    largest = max(share.buffers, key=lambda buffer: buffer.size_bytes)
    families = _families(plan)
    makers = Makers.of(plan)
    step = makers.cause(largest)
    partial = next((buffer for buffer in plan.buffers if is_partial_sum(buffer)), None)
    to_blame = is_partial_sum(largest) or (share.kind is BufferKind.SHARD and _exceeds_before(plan, cap_bytes))
    if partial is not None and to_blame:
        return _in_every(makers.cause(partial))
    if len(share.buffers) == 1:
        if largest.last > largest.first:
            return f"put fewer modules into a bucket of {families[step.kind]}, or raise the cap"
        name = next(
            plan.modules.modules[hook.module].name
            for hook in plan.hooks
            if hook.section is Section.POST_BACKWARD and hook.n == largest.first
        )
        return f"one {_NAMES[share.kind][0]} of {step.op} alone takes it: shard {name} as several groups, or raise the cap"
    if share.kind is BufferKind.SHARD and partial is None:
        room = (cap_bytes - top.size_bytes + share.size_bytes) // largest.size_bytes
        if room >= _lag(plan, families[Kind.ALL_REDUCE]):
            return f"{_apply_early(families, room)}, in place of the other apply, keeps {room} at most, which fits the cap"
    return _bounded(share.kind, plan)


def _exceeds_before(plan: Plan, cap_bytes: int) -> bool:
    """Whether a backward before the last is over the cap by itself."""
    return max(plan.bytes_by_step(*COMMUNICATION, backwards=Backwards.EARLIER), default=0) > cap_bytes


def _bounded(kind: BufferKind, plan: Plan) -> str:
    """What to write so that only a few buffers of a kind are alive."""
    families = _families(plan)
    scatter, reduce = families[Kind.REDUCE_SCATTER], families[Kind.ALL_REDUCE]
    if kind is BufferKind.GRADIENT:
        return f"issue {scatter} in the hook of its module: `- {scatter}_n: {{after: compute_n}}` in post_backward"
    if kind is BufferKind.RS_INPUT:
        lag = _lag(plan, scatter)
        then = "one input is alive" if lag == 1 else "a few inputs are alive"
        return f"write `- wait: {scatter}_<n-{lag}>` above {scatter}_n in post_backward: then {then} at a time"
    if kind is BufferKind.WIRE:
        lag = max(2, _lag(plan, reduce))
        return f"write `- wait: {reduce}_<n-{lag}>` in post_backward, so that compute knows early that copies are free"
    num_shards = max(2, _lag(plan, reduce))
    return f"{_apply_early(families, num_shards)}, in place of the other apply, keeps {num_shards} at most"


def _lag(plan: Plan, family: str) -> int:
    """How many modules back the ops of a family have surely been issued when a post-backward hook opens; 1 at least."""
    lags = [
        hook.n - step.op.first + (hook.section is Section.POST_BACKWARD)
        for hook in plan.hooks
        if hook.section is not Section.ROOT
        for step in hook.steps
        if isinstance(step, OpStep) and step.op.family == family
    ]
    return max([1, *lags])


def _in_every(skipped: OpStep) -> str:
    """What to write so that no partial sums are kept for want of an op."""
    family = skipped.op.family
    if skipped.kind is Kind.REDUCE_SCATTER:
        return f"take `when: {skipped.when}` away from {family}: reduced in every backward, gradients are kept as shards"
    return f"take `when: {skipped.when}` away from {family}: reduced in every backward, nothing is kept for the next"


def _apply_early(families: dict[Kind, str], num_shards: int) -> str:
    apply, reduce, scatter = (families[kind] for kind in (Kind.APPLY, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER))
    earlier = f"<n-{num_shards}>"
    return f"`- {apply}_{earlier}: {{after: {reduce}_{earlier}}}` above {scatter}_n in post_backward"


def _families(plan: Plan) -> dict[Kind, str]:
    """What the plan calls the op of each kind. Where nothing is all-reduced, apply follows the reduce-scatter."""
    used = {step.kind: step.op.family for step in plan.steps if isinstance(step, OpStep)}
    names = {kind: used.get(kind, traits.family) for kind, traits in TRAITS.items()}
    for missing, other in ((Kind.ALL_REDUCE, Kind.REDUCE_SCATTER), (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)):
        if missing not in used and other in used:
            names[missing] = names[other]
    return names


def unbounded(plan: Plan, *kinds: BufferKind) -> Iterator[Violation]:
    """Kinds of buffers of which every module's are alive at once, in a plan for so many modules that no window is as
    long; one finding for each line.
    """
    known: set[Span] = set()
    makers = Makers.of(plan)
    for kind in kinds:
        by_cause: dict[tuple[str, bool, Backwards], list[Buffer]] = {}
        for buffer in plan.buffers:
            if buffer.kind is kind:
                key = makers.cause(buffer).op.family, is_partial_sum(buffer), buffer.backwards
                by_cause.setdefault(key, []).append(buffer)
        for (_, is_partial, _), buffers in by_cause.items():
            first, last = min(buffers, key=lambda b: b.first), max(buffers, key=lambda b: b.first)
            step = makers.cause(last)
            if first.first < last.first and first.freed >= last.born and _span(step) not in known:
                known.add(_span(step))
                kept = "from one backward to the next" if is_partial else "until root"
                yield Violation(
                    "CP402",
                    f"every {_NAMES[kind][0]} is kept {kept}: communication memory grows with the number of modules",
                    _span(step),
                    _in_every(step) if is_partial else _bounded(kind, plan),
                    severity=Severity.WARNING,
                )


def _span(step: OpStep) -> Span:
    assert step.span is not None
    return step.span


def check(plan: Plan, cap_bytes: int) -> tuple[Violation, ...]:
    """Every finding in a plan that was compiled for the modules that will run."""
    return tuple(over_cap(plan, cap_bytes))


def check_growth(plan: Plan, *, of_shards: bool) -> tuple[Violation, ...]:
    """Every finding in a plan for as many modules as `graph.settled_module_count` says.

    Whole gradients of every module at once are what sharding is there to avoid.  Reduced shards of every module are as much
    as the gradients that they become; keeping them is a fair price for overlap, so they are looked at only `of_shards`.
    """
    return tuple(unbounded(plan, *(kind for kind in COMMUNICATION if of_shards or kind in WHOLE_GRADIENTS)))


RULES: Final = (
    Rule(
        code="CP401",
        title="More communication memory than the cap",
        severity=Severity.ERROR,
        what="The peak of communication memory on one rank, for the given module table, is above `--memory-cap`. The finding "
        "names the hook that it falls on, and what it is made of by kind and lane. Where `when` makes the backwards of an "
        "accumulated step differ, it says in which.",
        why="The job would run out of memory. In backward, where activations are still alive, there is the least of it.",
        wrong="""\
# modules: 24
# memory cap: 32MiB
version: 1
name: all_in_root
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        right="""\
# modules: 24
# memory cap: 32MiB
version: 1
name: two_at_once
post_backward:
  - wait: RS_<n-1>
  - apply_<n-2>: {after: AR_<n-2>}
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
""",
    ),
    Rule(
        code="CP402",
        title="Communication memory that grows with the model",
        severity=Severity.WARNING,
        what="Buffers of every module are alive at once, however many modules there are. Unsharded gradients and inputs of "
        "reduce-scatters are always looked at; reduced shards, which many good schedules keep until root or for the next "
        "backward, if there is a `--memory-cap`.",
        why="Without a wait compute never knows that a buffer is free. All gradients of the model, unsharded, on every rank "
        "are what sharding is there to avoid.",
        wrong="""\
version: 1
name: no_wait
post_backward:
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
        right="""\
version: 1
name: one_wait
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
""",
    ),
)
