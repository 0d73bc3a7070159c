"""Differences of plans: what is not told is the same, what is told is true, and both ways round agree."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commplan import ModuleTable, ScheduleError, compiler
from commplan.language import library
from commplan.ops import OpId, Section
from commplan.plan import OpStep, Plan, Step
from commplan.plan.diff import ChangeKind, PlanDiff, diff
from commplan.plan.model import COMMUNICATION
from tests.random_schedules import schedules

NAMES = library.names()
GATHERED = """\
version: 1
name: gathered
lanes: {own: {communicator: own, priority: high}}
pre_backward:
  - AG_<n+1>: {lane: own}
  - wait: AG_n
post_backward:
  - RS_n: {after: compute_n, chunks: 2, dtype: bf16}
  - AR_n: {after: RS_n, fuse: {modules: 2}, when: last_backward}
  - wait: RS_<n-1>
root:
  - apply_n: {after: AR_n}
"""


def name(step: Step) -> object:
    return step.op if isinstance(step, OpStep) else ("wait", step.after)


def places(plan: Plan) -> dict[OpId, tuple[Section, int]]:
    return {step.op: (hook.section, hook.n) for hook in plan.hooks for step in hook.steps if isinstance(step, OpStep)}


def assert_true(found: PlanDiff) -> None:
    """Every claim of a difference holds, and nothing else differs."""
    before, after = found.before, found.after
    old, new = places(before), places(after)
    ops: dict[ChangeKind, set[OpId]] = {kind: set() for kind in ChangeKind}
    for hook in found.hooks:
        for change in hook.changes:
            if isinstance(change.step, OpStep):
                ops[change.kind].add(change.step.op)
    assert ops[ChangeKind.ADDED] == set(new) - set(old)
    assert ops[ChangeKind.REMOVED] == set(old) - set(new)
    assert ops[ChangeKind.MOVED] == {op for op in set(old) & set(new) if old[op] != new[op]}
    by_hook = [{(hook.section, hook.n): hook.steps for hook in plan.hooks} for plan in (before, after)]
    for hook in found.hooks:
        key = (hook.hook.section, hook.hook.n)
        was, now = (side.get(key, ()) for side in by_hook)
        told = Counter(id(step) for change in hook.changes for step in (change.before, change.after) if step is not None)
        reordered = {id(s) for c in hook.changes if c.kind is ChangeKind.REORDERED for s in (c.before, c.after)}
        changed = {id(s) for c in hook.changes if c.kind is ChangeKind.CHANGED for s in (c.before, c.after)}
        gone = {op for op in old if old[op] == key and op in new and new[op] != key}
        kept = [
            [step for step in side if (id(step) not in told or id(step) in changed) and name(step) not in gone]
            for side in (was, now)
        ]
        assert list(map(name, kept[0])) == list(map(name, kept[1]))
        for one, other in zip(*kept, strict=True):
            assert (one == other) == (id(one) not in changed)
        for change in hook.changes:
            if change.kind in (ChangeKind.CHANGED, ChangeKind.REORDERED, ChangeKind.MOVED):
                assert change.before is not None
                assert change.after is not None
                assert name(change.before) == name(change.after)
                assert bool([f for f in change.fields if f.name != "follows"]) == (change.before != change.after)
                assert all(field.before != field.after or field.name == "follows" for field in change.fields)
            assert (change.source is not None) == (change.kind is ChangeKind.MOVED)
        assert len(reordered) <= 2 * max(len(kept[0]), len(was), 1)


COUNTED = (ChangeKind.ADDED, ChangeKind.REMOVED, ChangeKind.MOVED, ChangeKind.REORDERED)


def mirrored(found: PlanDiff) -> dict[ChangeKind, int]:
    other = {ChangeKind.ADDED: ChangeKind.REMOVED, ChangeKind.REMOVED: ChangeKind.ADDED}
    return {kind: found.count(other.get(kind, kind)) for kind in COUNTED}


@pytest.mark.parametrize(
    "pair", list(combinations((*NAMES, GATHERED), 2)), ids=lambda pair: "-".join(n.split("\n")[0] for n in pair)
)
def test_the_library_against_itself(pair: tuple[str, str]) -> None:
    before, after = (compiler.compile(schedule, 5) for schedule in pair)
    found = diff(before, after)
    assert_true(found)
    assert found.equal == (before.hooks == after.hooks and set(before.lanes) == set(after.lanes))
    assert mirrored(diff(after, before)) == {kind: found.count(kind) for kind in COUNTED}


@given(schedules(), schedules(), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_random_schedules(one: str, other: str, num_before: int, num_after: int) -> None:
    try:
        before, after = compiler.compile(one, num_before), compiler.compile(other, num_after)
    except ScheduleError:
        assume(False)
    found = diff(before, after)
    assert_true(found)
    assert_true(diff(after, before))
    assert found.same_modules == (num_before == num_after)
    assert not diff(before, before).count(ChangeKind.CHANGED)
    assert diff(before, before).equal


@pytest.mark.parametrize("schedule", [*NAMES, GATHERED], ids=lambda text: text.split("\n")[0])
def test_a_plan_read_back_is_equal(schedule: str) -> None:
    plan = compiler.compile(schedule, 4)
    found = diff(plan, Plan.from_json(plan.to_json()))
    assert found.equal
    assert not any(hook.changes for hook in found.hooks)


def test_names_of_schedules_and_params_are_not_compared() -> None:
    assert diff(compiler.compile("pipelined_allreduce", 5), compiler.compile("delayed_allreduce", 5, k=1)).equal


def test_other_modules_are_a_difference() -> None:
    one = ModuleTable.uniform(3)
    other = ModuleTable.uniform(3, shard=4)
    found = diff(compiler.compile("blocking", one), compiler.compile("blocking", other))
    assert not found.equal
    assert not found.same_modules
    assert not any(hook.changes for hook in found.hooks)


def test_hooks_have_their_bytes() -> None:
    before, after = compiler.compile("blocking", 4), compiler.compile("overlapped_allreduce", 4)
    for hook in diff(before, after).hooks:
        for plan, told in ((before, hook.before_bytes), (after, hook.after_bytes)):
            by_step = plan.bytes_by_step(*COMMUNICATION)
            hooks = [plan.hook_of(number) for number in range(len(plan.steps))]
            own = [
                size for size, at in zip(by_step, hooks, strict=True) if (at.section, at.n) == (hook.hook.section, hook.hook.n)
            ]
            assert told == max(own, default=None)


def test_as_few_as_possible_are_told_to_be_in_another_order() -> None:
    lines = ["RS_n: {after: compute_n}", "AR_<n-1>: {after: RS_<n-1>}", "apply_<n-2>: {after: AR_<n-2>}", "wait: RS_<n-1>"]

    def compiled(order: tuple[str, ...]) -> Plan:
        body = "".join(f"  - {line}\n" for line in order)
        return compiler.compile(f"version: 1\nname: x\npost_backward:\n{body}", 5)

    before = compiled(tuple(lines))
    for order in permutations(lines):
        hook = next(h for h in diff(before, compiled(order)).hooks if (h.hook.section, h.hook.n) == (Section.POST_BACKWARD, 3))
        old, new = ([name(step) for step in plan.hooks[3].steps] for plan in (before, compiled(order)))
        runs = (run for size in range(5) for run in permutations(new, size) if list(run) == [n for n in new if n in run])
        longest = max(len(run) for run in runs if list(run) == [n for n in old if n in run])
        assert sum(change.kind is ChangeKind.REORDERED for change in hook.changes) == 4 - longest


def test_hooks_of_either_plan_are_in_their_order() -> None:
    table = ModuleTable.uniform(4)
    for one, other in ((GATHERED, "blocking"), ("blocking", GATHERED)):
        keys = [
            (hook.hook.section, hook.hook.n)
            for hook in diff(compiler.compile(one, table), compiler.compile(other, table)).hooks
        ]
        timeline = [(s, n) for n in range(4) for s in (Section.PRE_BACKWARD, Section.POST_BACKWARD)] + [(Section.ROOT, 0)]
        assert keys == [key for key in timeline if key in keys]
        assert len(keys) == len({(h.section, h.n) for s in (one, other) for h in compiler.compile(s, table).hooks})
