"""Waits are enough and none too many; windows and the library keep as little as they promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commplan import ScheduleError, compiler
from commplan.language import library, parse
from commplan.plan import BufferKind, OpStep, Plan
from tests.oracle import Item, Layout, blocked_by
from tests.random_schedules import schedules

FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
MIB = 2**20
RS_INPUT_BYTES, SHARD_BYTES = 4 * MIB, 2 * MIB


def compiled(text: str, num_modules: int) -> Plan:
    try:
        return compiler.compile(text, num_modules)
    except ScheduleError:
        assume(False)
        raise


def executed(plan: Plan) -> list[Item]:
    """What an executor does that knows hooks, lanes and `waits`, and nothing of `after` or communicators."""
    items = []
    for place, hook in enumerate(plan.hooks):
        compute = hook.section == "post_backward"
        items.append(Item(f"compute_{hook.n}" if compute else f"open {place}", "compute"))
        for number, step in enumerate(hook.steps):
            waits = [str(op) for op in step.waits]
            if isinstance(step, OpStep):
                items.append(Item(str(step.op), step.lane, deps=waits))
            else:
                items.append(Item(f"wait {place} {number}", "compute", deps=waits))
    return items


def named(item: Item) -> str:
    """The name that a plan gives to an op of the interpreter."""
    if not item.modules:
        return item.name
    first, last = item.modules[0], item.modules[-1]
    modules = f"{first}" if first == last else f"{first}-{last}"
    return item.name.split("_")[0] + f"_{modules}" + (f"[{item.piece}/{item.pieces}]" if item.pieces > 1 else "")


def told(text: str, num_modules: int) -> set[tuple[str, str]]:
    """The pairs of ops that the language orders."""
    items = Layout(parse(text), num_modules, {}).items()
    real = [item for item in items if item.modules]
    return {
        (named(held), named(item))
        for held in real
        for stuck in [blocked_by(items, held.name)]
        for item in items
        if item.name in stuck and (item.modules or item.name.startswith("compute"))
    }


def done(plan: Plan) -> set[tuple[str, str]]:
    """The pairs of ops that the waits of a plan order, and (once more, by number) waits of compute."""
    items = executed(plan)
    return {
        (str(step.op), name)
        for step in plan.steps
        if isinstance(step, OpStep)
        for name in blocked_by(items, str(step.op))
        if not name.startswith(("open", "wait"))
    }


def without_one_wait(plan: Plan) -> Iterator[Plan]:
    for place, hook in enumerate(plan.hooks):
        for number, step in enumerate(hook.steps):
            for op in step.waits:
                fewer = replace(step, waits=tuple(other for other in step.waits if other != op))
                steps = (*hook.steps[:number], fewer, *hook.steps[number + 1 :])
                yield replace(plan, hooks=(*plan.hooks[:place], replace(hook, steps=steps), *plan.hooks[place + 1 :]))


@given(schedules(), st.integers(1, 4))
@FEW
def test_waits_bring_about_what_the_language_orders_and_nothing_else(text: str, num_modules: int) -> None:
    assert done(compiled(text, num_modules)) == told(text, num_modules)


@given(schedules(), st.integers(1, 4))
@FEW
def test_no_wait_is_too_many(text: str, num_modules: int) -> None:
    plan = compiled(text, num_modules)

    def held_back(one: Plan) -> list[set[str]]:
        items = executed(one)
        return [blocked_by(items, str(step.op)) for step in one.steps if isinstance(step, OpStep)]

    everything = held_back(plan)
    for fewer in without_one_wait(plan):
        assert held_back(fewer) != everything


@pytest.mark.parametrize("num_modules", [1, 5, 24])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_window_of_k_holds_k_shards(k: int, num_modules: int) -> None:
    window = compiler.compile("windowed_allreduce", num_modules, k=k)
    assert window.peak_bytes_of(BufferKind.SHARD) == min(k, num_modules) * SHARD_BYTES
    assert compiler.compile("overlapped_allreduce", num_modules).peak_bytes_of(BufferKind.SHARD) == num_modules * SHARD_BYTES


@pytest.mark.parametrize("name", sorted({*library.names()} - {"reduce_interval", "low_precision_reduce_scatter"}))
def test_the_library_keeps_one_reduce_scatter_input(name: str) -> None:
    """Every schedule waits for the RS before, or promises no more than one in flight; two have more or smaller ones."""
    assert compiler.compile(name, 12).peak_bytes_of(BufferKind.RS_INPUT) == RS_INPUT_BYTES


def test_waits_and_steps_grow_with_the_number_of_modules_and_no_faster() -> None:
    text = """\
version: 1
name: barrier
post_backward:
  - RS_n: {after: compute_n}
root:
  - AR_n: {after: RS_*}
  - wait: AR_*
  - apply_n: {after: AR_*}
"""
    named = {n: sum(len(step.after) + len(step.waits) for step in compiler.compile(text, n).steps) for n in (10, 20, 40)}
    assert named[40] - named[20] == 2 * (named[20] - named[10])
