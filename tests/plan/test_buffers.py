"""Buffers live as long as the language says, in every backward of an accumulated step."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commplan import PlanError, ScheduleError, compiler
from commplan.language import parse
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis, Kind
from commplan.plan import Backwards, BufferKind, Plan
from commplan.plan.model import COMMUNICATION
from commplan.plan.peak import peak
from tests.memory_oracle import Unit, bytes_by_step
from tests.oracle import Layout
from tests.random_schedules import schedules

FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
ACCUMULATED = """\
version: 1
name: accumulated
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
"""
AR_SKIPPED = ACCUMULATED.replace("after: RS_n", "after: RS_n, when: last_backward")
BOTH_SKIPPED = AR_SKIPPED.replace("after: compute_n", "after: compute_n, when: last_backward")
HSDP, SHARDED, REPLICATED = (("replicate", 2), ("shard", 3)), (("shard", 2),), (("replicate", 2),)
UNITS = st.builds(
    Unit,
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3)), min_size=1, max_size=2).map(tuple),
    st.sampled_from([HSDP, HSDP, HSDP, SHARDED, REPLICATED, ()]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["float32", "float32", "bfloat16"]),
)


def table(units: tuple[Unit, ...]) -> ModuleTable:
    """The module table of units, each with a frozen parameter beside those that it trains."""
    return ModuleTable(
        modules=tuple(
            Module(
                name=f"m{n}",
                parameters=(
                    Parameter(name="frozen", shape=(5, 5), requires_grad=False),
                    *(Parameter(name=f"w{i}", shape=shape) for i, shape in enumerate(unit.shapes)),
                ),
                axes={Axis(axis): ranks for axis, ranks in unit.axes},
                reduce_dtype=unit.reduce_dtype,
                gather_dtype=unit.gradient_dtype,
            )
            for n, unit in enumerate(units)
        )
    )


def layout(text: str, units: tuple[Unit, ...]) -> Layout:
    """The interpreter's reading of a schedule for units."""
    axis = {Kind.REDUCE_SCATTER: "shard", Kind.ALL_GATHER: "shard", Kind.ALL_REDUCE: "replicate"}
    return Layout(
        parse(text),
        len(units),
        {},
        needed=lambda kind, n: kind not in axis or axis[kind] in dict(units[n].axes),
        mesh=lambda n: (units[n].axes, units[n].reduce_dtype),
    )


def compiled(text: str, units: tuple[Unit, ...]) -> Plan:
    try:
        return compiler.compile(text, table(units))
    except ScheduleError:
        assume(False)
        raise


def compare(text: str, units: tuple[Unit, ...]) -> None:
    """Hold what a plan declares against accumulated steps of one to four backwards."""
    plan = compiled(text, units)
    first, earlier, again, last = bytes_by_step(layout(text, units), units, 4)
    assert earlier == again
    assert list(plan.bytes_by_step(*COMMUNICATION, backwards=Backwards.EARLIER)) == earlier
    assert list(plan.bytes_by_step(*COMMUNICATION, backwards=Backwards.LAST)) == last
    most = [max(pair) for pair in zip(earlier, last, strict=True)]
    assert list(plan.bytes_by_step(*COMMUNICATION)) == most
    assert plan.peak_bytes == max(most)
    step = most.index(max(most))
    assert plan.steps[step] in plan.peak_hook.steps
    expected = {0: Backwards.EVERY, 1: Backwards.EARLIER, -1: Backwards.LAST}
    assert plan.peak_backwards is expected[(earlier[step] > last[step]) - (earlier[step] < last[step])]
    assert sum(share.size_bytes for share in peak(plan).shares) == plan.peak_bytes
    for fewer in (first, *bytes_by_step(layout(text, units), units, 1), *bytes_by_step(layout(text, units), units, 2)):
        assert max(fewer) <= plan.peak_bytes


@given(schedules(), st.lists(UNITS, min_size=1, max_size=5).map(tuple))
@FEW
def test_memory_is_what_the_language_counts(text: str, units: tuple[Unit, ...]) -> None:
    compare(text, units)


@given(schedules(), st.integers(1, 5), UNITS, st.sampled_from([("AR",), ("RS", "AR")]))
@FEW
def test_memory_of_partial_sums_is_what_the_language_counts(
    text: str, num_modules: int, unit: Unit, skipped: tuple[str, ...]
) -> None:
    lines = text.replace(", when: last_backward", "").replace("when: last_backward", "").splitlines()
    for family in skipped:
        lines = [
            line.replace("{", "{when: last_backward, ").replace(", }", "}") if f"- {family}_" in line else line
            for line in lines
        ]
    compare("\n".join(lines) + "\n", (unit,) * num_modules)


# Told by hand: three modules of 4 MB of gradients, shards of 2 MB.

MB = 10**6
STEPS = ["RS_0", "AR_0", "wait", "RS_1", "AR_1", "wait", "RS_2", "AR_2", "wait", "apply_0", "apply_1", "apply_2"]
THREE = (Unit(((MB, 1),), (("replicate", 2), ("shard", 2))),) * 3


def in_mb(text: str, backwards: Backwards, units: tuple[Unit, ...] = THREE) -> list[float]:
    plan = compiled(text, units)
    return [size_bytes / MB for size_bytes in plan.bytes_by_step(*COMMUNICATION, backwards=backwards)]


def test_a_skipped_all_reduce_keeps_shards() -> None:
    plan = compiled(AR_SKIPPED, THREE)
    assert [str(getattr(step, "op", "wait")) for step in plan.steps] == STEPS
    partial = [6, 6, 6, 4, 4, 4, 2, 2, 2, 0, 0, 0]
    inputs = [4, 4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0]
    kept = [2, 2, 2, 4, 4, 4, 6, 6, 6, 6, 6, 6]
    applied = [2, 2, 2, 4, 4, 4, 6, 6, 6, 6, 4, 2]
    assert in_mb(AR_SKIPPED, Backwards.EARLIER) == [sum(parts) for parts in zip(partial, inputs, kept, strict=True)]
    assert in_mb(AR_SKIPPED, Backwards.LAST) == [sum(parts) for parts in zip(partial, inputs, applied, strict=True)]
    assert plan.partial_sum_bytes == plan.peak_bytes_of(BufferKind.PARTIAL) == 6 * MB
    assert (plan.peak_bytes, plan.peak_backwards, str(plan.peak_hook)) == (12 * MB, Backwards.EVERY, "post_backward 0")


def test_a_window_bounds_the_last_backward_alone() -> None:
    window = AR_SKIPPED.replace("  - RS_n:", "  - apply_<n-1>: {after: AR_<n-1>}\n  - RS_n:").split("root:")[0]
    plan = compiled(window, THREE * 4)
    assert (plan.peak_bytes, plan.peak_backwards) == (24 * MB + 6 * MB, Backwards.EVERY)
    assert plan.bytes_by_step(BufferKind.SHARD, backwards=Backwards.LAST)[-1] == 2 * MB
    assert plan.bytes_by_step(BufferKind.SHARD, backwards=Backwards.EARLIER)[-1] == 24 * MB


def test_a_skipped_reduce_scatter_keeps_whole_gradients() -> None:
    assert in_mb(BOTH_SKIPPED, Backwards.EARLIER) == [12] * len(STEPS)
    gradients = [12, 8, 8, 8, 4, 4, 4, 0, 0, 0, 0, 0]
    inputs = [4, 4, 4, 4, 4, 4, 4, 4, 4, 0, 0, 0]
    shards = [0, 2, 2, 2, 4, 4, 4, 6, 6, 6, 4, 2]  # of RS_n there is none yet while its gradients are
    assert in_mb(BOTH_SKIPPED, Backwards.LAST) == [sum(parts) for parts in zip(gradients, inputs, shards, strict=True)]
    plan = compiled(BOTH_SKIPPED, THREE)
    assert plan.partial_sum_bytes == 12 * MB
    assert (plan.peak_bytes, plan.peak_backwards, str(plan.peak_hook)) == (16 * MB, Backwards.LAST, "post_backward 0")


@pytest.mark.parametrize(
    ("gradient", "reduce", "megabytes"), [("bfloat16", "float32", 12), ("float32", "bfloat16", 12), ("bfloat16", "bfloat16", 6)]
)
def test_whole_gradients_are_summed_in_the_wider_dtype(gradient: str, reduce: str, megabytes: int) -> None:
    units = (Unit(((MB, 1),), HSDP, gradient, reduce),) * 3
    assert compiled(BOTH_SKIPPED, units).partial_sum_bytes == megabytes * MB
    replicated = (Unit(((MB, 1),), REPLICATED, gradient, reduce),) * 3
    assert compiled(AR_SKIPPED, replicated).partial_sum_bytes == megabytes * MB


HELD = """\
version: 1
name: held
post_backward:
  - RS_<n-1>: {after: compute_<n-1>}
  - AR_<n-1>: {after: RS_<n-1>}
  - apply_<n-1>: {after: AR_<n-1>}
"""
IN_BF16 = HELD.replace("after: RS_<n-1>", "after: RS_<n-1>, dtype: bf16")


@pytest.mark.parametrize(
    ("text", "axes", "gradient", "megabytes", "kinds"),
    [
        (HELD, (("replicate", 2), ("shard", 2)), "float32", 4 + 4, {"gradient", "rs_input"}),
        (HELD, (("replicate", 2), ("shard", 2)), "bfloat16", 2 + 4, {"gradient", "rs_input"}),
        (HELD, (("shard", 2),), "float32", 4 + 4, {"gradient", "rs_input"}),
        (HELD, (("replicate", 4), ("shard", 1)), "bfloat16", 4 + 4, {"rs_input", "shard"}),
        (HELD, (("replicate", 2),), "float32", 4 + 4, {"gradient", "shard"}),
        (HELD, (("replicate", 2),), "bfloat16", 2 + 4, {"gradient", "shard"}),
        (IN_BF16, (("replicate", 2),), "float32", 4 + 4, {"gradient", "shard"}),
        (HELD, (), "float32", 4, {"gradient"}),
    ],
)
def test_gradients_that_outlive_their_hook_are_gone_before_there_is_what_is_made_of_them(
    text: str, axes: tuple[tuple[str, int], ...], gradient: str, megabytes: int, kinds: set[str]
) -> None:
    plan = compiled(text, (Unit(((MB, 1),), axes, gradient),) * 2)
    assert plan.peak_bytes == megabytes * MB
    assert {str(share.kind) for share in peak(plan).shares} == kinds


def test_a_module_without_an_all_reduce_keeps_nothing() -> None:
    units = (Unit(((MB, 1),), SHARDED),) * 3
    assert compiled(AR_SKIPPED, units).buffers == compiled(ACCUMULATED, units).buffers


@pytest.mark.parametrize("value", ["earlier", "last", "first", None, 1, []])
def test_a_buffer_of_other_backwards_is_refused(value: object) -> None:
    data = json.loads(compiled(AR_SKIPPED, THREE).to_json())
    for number, buffer in enumerate(data["buffers"]):
        if buffer.get("backwards") != value:
            changed = [{**one, "backwards": value} if n == number else one for n, one in enumerate(data["buffers"])]
            with pytest.raises(PlanError, match="buffer"):
                Plan.from_json(json.dumps({**data, "buffers": changed}))


def test_that_a_buffer_lives_in_every_backward_may_be_said() -> None:
    plan = compiled(ACCUMULATED, THREE)
    data = json.loads(plan.to_json())
    assert not any("backwards" in buffer for buffer in data["buffers"])
    data["buffers"] = [{**buffer, "backwards": "every"} for buffer in data["buffers"]]
    assert Plan.from_json(json.dumps(data)) == plan
