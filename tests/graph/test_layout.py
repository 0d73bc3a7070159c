"""Where ops fall: hooks from two orders, drains at both ends, ops left out."""

from __future__ import annotations

from commplan import compiler
from commplan.graph.timeline import timeline
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis
from commplan.plan import OpStep, Plan

HSDP = {Axis.SHARD: 2, Axis.REPLICATE: 2}


def module(name: str, *, axes: dict[Axis, int] = HSDP, trainable: bool = True, resharded: bool = True) -> Module:
    parameters = (Parameter(name="w", shape=(8, 8), requires_grad=trainable),)
    return Module(name=name, parameters=parameters, axes=axes, resharded_after_forward=resharded)


def layout(plan: Plan) -> list[str]:
    """Each hook with its steps, `|` before a wait's targets."""
    return [
        f"{hook}: " + " ".join(str(s.op) if isinstance(s, OpStep) else "|" + ",".join(map(str, s.after)) for s in hook.steps)
        for hook in plan.hooks
    ]


NESTED = ModuleTable(modules=tuple(map(module, ("b2", "b1", "b0", "root"))), need_order=(3, 0, 1, 2))


def test_hooks_follow_from_both_orders() -> None:
    found = [f"{point.section}_{NESTED.modules[point.module].name}" for point in timeline(NESTED).points[:-1]]
    assert found == [
        "pre_backward_root",
        "pre_backward_b2",
        "post_backward_b2",
        "pre_backward_b1",
        "post_backward_b1",
        "pre_backward_b0",
        "post_backward_b0",
        "post_backward_root",
    ]


GATHERED = """\
version: 1
name: gathered
pre_backward:
  - AG_<n+1>
  - wait: AG_n
  - AR_<n-1>: {after: RS_<n-1>}
post_backward:
  - RS_n: {after: compute_n}
root:
  - apply_n: {after: AR_n}
"""


def test_gathers_count_in_need_order_and_reductions_in_completion_order() -> None:
    assert layout(compiler.compile(GATHERED, NESTED)) == [
        "pre_backward 0: AG_0 AG_1 |AG_0",
        "pre_backward 1: AG_2 |AG_1",
        "post_backward 0: RS_0",
        "pre_backward 2: AG_3 |AG_2 AR_0",
        "post_backward 1: RS_1",
        "pre_backward 3: |AG_3 AR_1",
        "post_backward 2: RS_2",
        "post_backward 3: RS_3",
        "root: AR_2 AR_3 apply_0 apply_1 apply_2 apply_3",
    ]


def test_parameters_of_an_outer_unit_are_needed_before_its_children_run() -> None:
    late = GATHERED.replace("wait: AG_n", "wait: AG_<n-1>")
    assert {violation.code for violation in compiler.check(late, NESTED)} == {"CP201"}
    by_child = GATHERED.replace("  - wait: AG_n\n", "").replace("post_backward:", "post_backward:\n  - wait: AG_<n+1>")
    (found,) = compiler.check(by_child, NESTED)
    assert (found.code, "backward of b2" in found.message) == ("CP201", True)
    ahead = "\n".join(GATHERED.splitlines()).replace("wait: AG_n", "wait: AG_<n+1>")
    assert {violation.code for violation in compiler.check(ahead, NESTED)} == {"CP502"}


def test_frozen_modules_are_gathered_and_not_counted() -> None:
    table = ModuleTable(modules=(module("a"), module("frozen", trainable=False), module("b")))
    assert layout(compiler.compile(GATHERED, table)) == [
        "pre_backward 0: AG_0 AG_1 |AG_0",
        "post_backward 0: RS_0",
        "pre_backward 1: AG_2 |AG_1 AR_0",
        "pre_backward 2: |AG_2",
        "post_backward 1: RS_1",
        "root: AR_1 apply_0 apply_1",
    ]


def test_a_model_without_anything_to_reduce_has_an_empty_plan() -> None:
    text = """\
version: 1
name: barriers
post_backward:
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - wait: [RS_*, compute_*, AR_n]
  - apply_n: {after: [AR_n, AR_*]}
"""
    plan = compiler.compile(text, ModuleTable(modules=(module("frozen", trainable=False),)))
    assert layout(plan) == ["root: "]
    assert plan.peak_bytes == 0
    assert Plan.from_json(plan.to_json()) == plan


def test_what_falls_past_the_last_hook_is_drained_in_order() -> None:
    assert layout(compiler.compile("bucketed_pipeline_depth2", 2)) == [
        "post_backward 0: RS_0",
        "post_backward 1: |RS_0 AR_0 RS_1",
        "root: |AR_0 apply_0 |RS_1 AR_1 |AR_1 apply_1",
    ]


def test_pre_backward_lines_drain_before_post_backward_lines() -> None:
    text = """\
version: 1
name: both
pre_backward:
  - AR_<n-2>: {after: RS_<n-2>}
post_backward:
  - RS_<n-1>: {after: compute_<n-1>}
root:
  - apply_n: {after: AR_n}
"""
    assert layout(compiler.compile(text, 2))[-1] == "root: AR_0 RS_1 AR_1 apply_0 apply_1"


def waits_of(plan: Plan) -> dict[str, set[str]]:
    return {str(step.op): set(map(str, step.waits)) for step in plan.steps if isinstance(step, OpStep)}


def test_what_waits_for_an_op_left_out_waits_for_what_that_waited_for() -> None:
    fsdp = ModuleTable(modules=(module("a", axes={Axis.SHARD: 2}), module("b", axes={Axis.SHARD: 2})))
    found = waits_of(compiler.compile("overlapped_allreduce", fsdp))
    assert set(found) == {"RS_0", "RS_1", "apply_0", "apply_1"}
    plain = ModuleTable(modules=(module("a", axes={}), module("b", axes={})))
    assert waits_of(compiler.compile("overlapped_allreduce", plain)) == {"apply_0": set(), "apply_1": set()}


def test_an_op_left_out_keeps_its_place_in_its_lane() -> None:
    text = """\
version: 1
name: by_lane
post_backward:
  - RS_n: {lane: shard}
  - AR_n: {lane: shard}
  - apply_n: {after: AR_n}
"""
    fsdp = ModuleTable(modules=(module("a", axes={Axis.SHARD: 2}),))
    assert waits_of(compiler.compile(text, fsdp)) == {"RS_0": set(), "apply_0": {"RS_0"}}


FUSED = """\
version: 1
name: fused
post_backward:
  - RS_n: {after: compute_n, chunks: 2}
  - AR_n: {after: RS_n, fuse: {modules: 2, tail: 1}, chunks: 2}
root:
  - apply_n: {after: AR_n}
"""


def test_buckets_run_in_the_hook_of_their_last_member_and_pieces_in_order() -> None:
    plan = compiler.compile(FUSED, 4)
    assert layout(plan) == [
        "post_backward 0: RS_0[0/2] RS_0[1/2]",
        "post_backward 1: RS_1[0/2] RS_1[1/2] AR_0-1[0/2] AR_0-1[1/2]",
        "post_backward 2: RS_2[0/2] RS_2[1/2] AR_2[0/2] AR_2[1/2]",
        "post_backward 3: RS_3[0/2] RS_3[1/2] AR_3[0/2] AR_3[1/2]",
        "root: apply_0 apply_1 apply_2 apply_3",
    ]
    waits = waits_of(plan)
    assert waits["AR_0-1[0/2]"] == {"RS_1[0/2]"}
    assert waits["AR_0-1[1/2]"] == {"RS_1[1/2]"}


def test_a_bucket_closes_before_the_member_that_would_exceed_its_bytes() -> None:
    sizes = (8, 8, 16, 40, 8)
    table = ModuleTable(
        modules=tuple(
            Module(name=f"m{n}", parameters=(Parameter(name="w", shape=(size,)),), axes=HSDP) for n, size in enumerate(sizes)
        )
    )
    text = FUSED.replace("{modules: 2, tail: 1}, chunks: 2", "{bytes: 64}").replace(", chunks: 2", "")
    names = [name for hook in layout(compiler.compile(text, table)) for name in hook.split() if name.startswith("AR")]
    # Shards are of 16, 16, 32, 80 and 16 bytes.
    assert names == ["AR_0-2", "AR_3", "AR_4"]
