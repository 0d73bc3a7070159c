"""Reasons on timelines made by hand, in which each is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import commplan
from commplan.ops import OpId
from commplan.plan.model import OpStep, Plan, WaitStep
from commplan.sight.explain import TAIL, Explainer
from commplan.sight.figures import ALL_LANES, MAX_ROWS, Arrivals, describe_backward
from commplan.sight.intervals import Interval
from commplan.sight.report import BackwardReport

SCHEDULE = """
version: 1
name: by_hand
summary: Every kind of wait.
lanes:
  apply: {priority: normal}
post_backward:
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
  - apply_<n-1>: {after: AR_<n-1>, lane: apply}
  - wait: AR_<n-2>
"""
LINE_OF_WAIT = 11

# Two collectives on one lane, which only a queue orders.
ONE_LANE = """
version: 1
name: one_lane
summary: All-reduces behind reduce-scatters on one lane.
lanes:
  comm: {priority: normal}
post_backward:
  - RS_n: {after: compute_n, lane: comm}
  - AR_<n-1>: {after: RS_<n-1>, lane: comm}
  - wait: AR_<n-1>
  - apply_<n-1>: {after: AR_<n-1>}
"""


def plan(text: str = SCHEDULE, num_modules: int = 6) -> Plan:
    return commplan.compile(text, num_modules)


def step_number(of: Plan, kind: type, hook: str, name: str) -> str:
    """The number of the step in this hook that is, or waits for, this op."""
    number = 0
    for each in of.hooks:
        for step in each.steps:
            named = [str(step.op)] if isinstance(step, OpStep) else [str(op) for op in step.after]
            if isinstance(step, kind) and str(each) == hook and name in named:
                return str(number)
            number += 1
    raise AssertionError(f"no such step: {hook}, {name}")


def backward(of: Plan, ops: list[Interval], waits: list[Interval], end_s: float = 100.0) -> BackwardReport:
    return BackwardReport(0.0, end_s, tuple(ops), tuple(waits), 10, 20, 3, of)


def reasons(report: BackwardReport, op: str, **arrivals: object) -> tuple[str, ...]:
    explainer = Explainer(report, **arrivals)  # type: ignore[arg-type]
    return next(explainer.reasons(run) for run in explainer.runs if run.interval.op == op)


def test_compute_waited_for_it() -> None:
    of = plan()
    wait = Interval(step_number(of, WaitStep, "post_backward 3", "AR_1"), "compute", 10, 14)
    report = backward(of, [Interval("AR_1", "replicate", 8, 14, 8)], [wait])
    name = of.modules.modules[3].name
    assert reasons(report, "AR_1") == (f"compute waited for it in post_backward of {name} (wait: AR_1, <text>:{LINE_OF_WAIT})",)


def test_an_op_that_ends_before_or_begins_after_the_wait_is_hidden() -> None:
    of = plan()
    wait = Interval(step_number(of, WaitStep, "post_backward 3", "AR_1"), "compute", 10, 14)
    report = backward(of, [Interval("RS_2", "shard", 5, 10, 5), Interval("RS_3", "shard", 14, 15, 9)], [wait])
    assert reasons(report, "RS_2") == reasons(report, "RS_3") == ()


def test_a_wait_before_it_began_is_no_reason() -> None:
    of = plan()
    waits = [
        Interval(step_number(of, WaitStep, "post_backward 3", "AR_1"), "compute", 3, 4),
        Interval(step_number(of, WaitStep, "post_backward 4", "AR_2"), "compute", 10, 14),
    ]
    report = backward(of, [Interval("AR_2", "replicate", 8, 14, 8)], waits)
    (reason,) = reasons(report, "AR_2")
    assert "wait: AR_2" in reason


def test_a_long_queue_is_in_the_way_of_its_last() -> None:
    """As many ops as modules in one wait: each is looked at once."""
    of = plan(num_modules=300)
    wait = Interval(step_number(of, WaitStep, "post_backward 299", "AR_297"), "compute", 0.5, 298)
    ops = [Interval(f"AR_{n}", "replicate", n, n + 1, 0) for n in range(298)]
    explainer = Explainer(backward(of, ops, [wait]))
    told = [explainer.reasons(run)[0] for run in explainer.runs]
    assert all(text.startswith("in the way of AR_297") for text in told[:-1])
    assert told[-1].startswith("compute waited for it")


@pytest.mark.parametrize("why", ["", "root"])
def test_tail(why: str) -> None:
    of = plan()
    number = why and step_number(of, WaitStep, "root", "AR_4")
    report = backward(of, [Interval("AR_4", "replicate", 80, 95, 80)], [Interval(number, "compute", 85, 95)])
    assert reasons(report, "AR_4") == (TAIL,)


def test_in_the_way_of_what_compute_waited_for() -> None:
    of = plan(ONE_LANE)
    wait = Interval(step_number(of, WaitStep, "post_backward 2", "AR_1"), "compute", 10, 20)
    ops = [Interval("RS_2", "comm", 9, 15, 9), Interval("AR_1", "comm", 15, 20, 9.5)]
    report = backward(of, ops, [wait])
    (where,) = reasons(report, "RS_2")
    assert where.startswith("in the way of AR_1, for which compute waited in post_backward of")
    assert reasons(report, "AR_1")[1:] == ("queued behind RS_2 on its lane for 5500.0 ms",)


def test_in_the_way_by_what_the_schedule_says() -> None:
    """RS_1, on another lane, has to end before AR_1 can begin."""
    of = plan()
    wait = Interval(step_number(of, WaitStep, "post_backward 3", "AR_1"), "compute", 10, 20)
    ops = [
        Interval("RS_1", "shard", 5, 12, 5),
        Interval("RS_2", "shard", 12, 13, 6),
        Interval("AR_1", "replicate", 12, 20, 5.5),
    ]
    report = backward(of, ops, [wait])
    assert "in the way of AR_1" in reasons(report, "RS_1")[0]
    assert reasons(report, "AR_1")[1:] == ("queued behind RS_1 which it comes after for 6500.0 ms",)
    assert reasons(report, "RS_2")[0].endswith(", not for it")


def test_an_apply_on_a_lane_is_what_compute_waited_for() -> None:
    of = plan(SCHEDULE.replace("wait: AR_<n-2>", "wait: apply_<n-1>"))
    wait = Interval(step_number(of, WaitStep, "post_backward 3", "apply_2"), "compute", 10, 20)
    report = backward(of, [Interval("AR_2", "replicate", 5, 19, 5)], [wait])
    assert reasons(report, "AR_2")[0].startswith("in the way of apply_2, for which compute waited in post_backward of")


def test_behind_another_op_of_its_communicator() -> None:
    of = plan()

    def behind_ar_0(step: object) -> object:
        is_it = isinstance(step, OpStep) and str(step.op) == "AR_3"
        return replace(step, waits=(*step.waits, OpId("AR", 0))) if is_it else step  # type: ignore[attr-defined, type-var]

    hooks = tuple(replace(hook, steps=tuple(map(behind_ar_0, hook.steps))) for hook in of.hooks)  # type: ignore[arg-type]
    ops = [Interval("AR_0", "elsewhere", 0, 9, 0), Interval("AR_3", "replicate", 9, 12, 2)]
    report = backward(replace(of, hooks=hooks), ops, [Interval("", "compute", 10, 12)])
    assert reasons(report, "AR_3") == (TAIL, "queued behind AR_0 on its communicator for 7000.0 ms")


def test_a_short_delay_is_not_told() -> None:
    of = plan()
    ops = [Interval("AR_0", "replicate", 0, 5.01, 0), Interval("AR_1", "replicate", 5.01, 20, 5)]
    report = backward(of, ops, [Interval("", "compute", 10, 20)])
    assert reasons(report, "AR_1") == (TAIL,)


def test_an_op_that_began_when_it_was_issued_was_not_queued() -> None:
    of = plan()
    ops = [Interval("AR_0", "replicate", 0, 5, 0), Interval("AR_1", "replicate", 9, 20, 9)]
    assert reasons(backward(of, ops, [Interval("", "compute", 10, 20)]), "AR_1") == (TAIL,)


@pytest.mark.parametrize(("arrived_s", "error_s", "is_told"), [(13.0, 0.0, True), (13.0, 4.0, False), (10.0, 0.0, False)])
def test_peers(arrived_s: float, error_s: float, is_told: bool) -> None:
    of = plan()
    report = backward(of, [Interval("AR_1", "replicate", 10, 20, 10)], [Interval("", "compute", 10, 20)])
    told = reasons(report, "AR_1", last_peers={"AR_1": [(arrived_s, 2)]}, error_s=error_s)
    assert told == ((TAIL, "peers arrived 3000.0 ms later (rank 2 last)") if is_told else (TAIL,))


def test_an_op_that_runs_twice_has_the_peers_of_each_turn() -> None:
    of = plan()
    ops = [Interval("AR_1", "replicate", 10, 20, 10), Interval("AR_1", "replicate", 20, 30, 20)]
    explainer = Explainer(backward(of, ops, []), {"AR_1": [(12.0, 2), (27.0, 0)]})
    assert [run.peers_span for run in explainer.runs] == [(10, 12), (20, 27)]


def test_without_a_plan_only_the_tail_is_known() -> None:
    report = BackwardReport(0, 30, (Interval("AR_1", "replicate", 10, 20),), (Interval("7", "compute", 10, 20),), 0, 0)
    assert reasons(report, "AR_1") == (TAIL,)


def test_report_as_text_and_as_json() -> None:
    of = plan(num_modules=2 * MAX_ROWS)
    ops = [Interval(f"AR_{n}", "replicate", 4 * n, 4 * n + 3, 4 * n) for n in range(2 * MAX_ROWS)]
    waits = [Interval("", "compute", 4 * n + 2 - n / 100, 4 * n + 3) for n in range(2 * MAX_ROWS)]
    last = backward(of, ops, waits)
    report = describe_backward(last, 5, Arrivals({"AR_3": [(13.0, 6)]}, 0.25, 2))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    every = next(lane for lane in report.lanes if lane.lane == ALL_LANES)
    assert every.hidden_s + every.exposed_s + every.idle_s == pytest.approx(report.backward_s)
    assert every.peers_s == 1
    text = str(report)
    assert "by_hand, backward 3 on rank 5" in text
    assert "clocks of 2 host(s), times of peers are right to 250.00 ms" in text
    exposed = [op.exposed_s for op in report.exposed_ops]
    assert exposed == sorted(exposed, reverse=True)
    assert f"and {MAX_ROWS} more, exposed for" in text
    assert "peers were not asked" in str(describe_backward(last, 5, None))


def test_nothing_exposed() -> None:
    of = plan()
    assert "No collective was exposed." in str(
        describe_backward(backward(of, [Interval("AR_1", "replicate", 1, 2, 1)], []), 0, None)
    )
