"""CP401, CP402: memory. What a plan keeps alive, against a cap and against the number of modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commplan.errors import Rule, Severity, Span, Violation
from commplan.ops import TRAITS, Kind
from commplan.plan.model import COMMUNICATION, Buffer, BufferKind, OpStep, Plan
from commplan.plan.peak import Peak, Share, maker, peak
from commplan.plan.text import size

_NAMES: Final = {
    BufferKind.GRADIENT: "unsharded gradient",
    BufferKind.RS_INPUT: "reduce-scatter input",
    BufferKind.SHARD: "reduced shard",
    BufferKind.WIRE: "wire copy",
}

WHOLE_GRADIENTS: Final = (BufferKind.GRADIENT, BufferKind.RS_INPUT)
"""Buffers as large as a module's gradients before they are sharded."""


def over_cap(plan: Plan, cap_bytes: int) -> Iterator[Violation]:
    """A peak above `cap_bytes`."""
    top = peak(plan)
    if top.size_bytes <= cap_bytes:
        return
    parts = "; ".join(f"{_counted(share)} on lane {share.lane} {size(share.size_bytes)}" for share in top.shares)
    yield Violation(
        "CP401",
        f"communication memory peaks in {top.hook} at {size(top.size_bytes)} ({top.size_bytes:,} bytes), over the cap of "
        f"{size(cap_bytes)} ({cap_bytes:,} bytes): {parts}",
        _span(maker(plan, top.shares[0].buffers[-1])),
        _remedy(plan, top, cap_bytes),
    )


def _counted(share: Share) -> str:
    num = len(share.buffers)
    return f"{num} {_NAMES[share.kind]}{'s' * (num != 1)}"


def _remedy(plan: Plan, top: Peak, cap_bytes: int) -> str:
    share = top.shares[0]
    largest = max(share.buffers, key=lambda buffer: buffer.size_bytes)
    families = _families(plan)
    if len(share.buffers) == 1:
        if largest.last > largest.first:
            return f"put fewer modules into a bucket of {families[maker(plan, largest).kind]}, or raise the cap"
        step = maker(plan, largest)
        return f"one {_NAMES[share.kind]} of {step.op} alone takes it: shard that module as several groups, or raise the cap"
    if share.kind is BufferKind.SHARD:
        room = (cap_bytes - top.size_bytes + share.size_bytes) // largest.size_bytes
        if room > 0:
            return f"{_apply_early(families, room)}, in place of the other apply, keeps {room} at most, which fits the cap"
    return _bounded(share.kind, plan)


def _bounded(kind: BufferKind, plan: Plan) -> str:
    """What to write so that only a few buffers of a kind are alive."""
    families = _families(plan)
    scatter, reduce = families[Kind.REDUCE_SCATTER], families[Kind.ALL_REDUCE]
    if kind is BufferKind.GRADIENT:
        return f"issue {scatter} in the hook of its module: `- {scatter}_n: {{after: compute_n}}` in post_backward"
    if kind is BufferKind.RS_INPUT:
        return f"write `- wait: {scatter}_<n-1>` above {scatter}_n in post_backward: one input at a time"
    if kind is BufferKind.WIRE:
        return f"write `- wait: {reduce}_<n-2>` in post_backward, so that compute knows early that copies are free"
    return f"{_apply_early(families, 2)}, in place of the other apply, keeps two"


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
    for kind in kinds:
        found = [buffer for buffer in plan.buffers if buffer.kind is kind]
        by_op: dict[str, list[Buffer]] = {}
        for buffer in found:
            by_op.setdefault(maker(plan, buffer).op.family, []).append(buffer)
        for buffers in by_op.values():
            first, last = min(buffers, key=lambda b: b.first), max(buffers, key=lambda b: b.first)
            span = _span(maker(plan, last))
            if first.first < last.first and first.freed >= last.born and span not in known:
                known.add(span)
                yield Violation(
                    "CP402",
                    f"every {_NAMES[kind]} is kept until root: communication memory grows with the number of modules",
                    span,
                    _bounded(kind, plan),
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
        "names the hook that it falls on, and what it is made of by kind and lane.",
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
        "reduce-scatters are always looked at; reduced shards, which many good schedules keep until root, if there is a "
        "`--memory-cap`.",
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
