"""Simulated times where things slow each other down: a link that is shared, compute beside communication."""

from __future__ import annotations

import pytest

import commplan
from commplan.plan.model import OpStep
from commplan.simulate import Costs, OpCost, Simulated, simulate

TWO_LANES = """\
version: 1
name: two_lanes
summary: Reductions of one module beside those of another.
post_backward:
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
root:
  - apply_n: {after: AR_n}
"""


def run(costs: dict[str, OpCost], compute: list[float], **more: dict[str, float]) -> Simulated:
    plan = commplan.compile(TWO_LANES, len(compute))
    ops = {step.op: costs.get(str(step.op), OpCost()) for step in plan.steps if isinstance(step, OpStep)}
    return simulate(plan, Costs(compute, ops, **more))


def span(simulated: Simulated, op: str) -> tuple[float, float]:
    (found,) = [ran for ran in simulated.ops if str(ran.op) == op]
    return found.begin_s, found.end_s


def over(seconds: float, link: str = "wire", latency_s: float = 0) -> OpCost:
    return OpCost(latency_s=latency_s, transfer_s=seconds, link=link)


def test_two_transfers_share_a_link_from_the_moment_they_overlap() -> None:
    # AR_0 has 5 of 10 left when RS_1 begins: both go at half speed; when AR_0 is over, RS_1 has 5 left.
    found = run({"AR_0": over(10), "RS_1": over(10)}, [0, 5])
    assert span(found, "AR_0") == (0, 15)
    assert span(found, "RS_1") == (5, 20)


def test_links_of_their_own_do_not() -> None:
    found = run({"AR_0": over(10), "RS_1": over(10, "other")}, [0, 5])
    assert span(found, "AR_0") == (0, 10)
    assert span(found, "RS_1") == (5, 15)


def test_latency_is_not_shared() -> None:
    found = run({"AR_0": over(10), "RS_1": over(4, latency_s=5)}, [0, 5])
    assert span(found, "AR_0") == (0, 10)
    assert span(found, "RS_1") == (5, 14)


def test_transfers_that_leave_room_on_a_link_do_not_slow_each_other() -> None:
    costs = {"AR_0": over(10), "RS_1": over(10)}
    assert span(run(costs, [0, 5], demand={"wire": 0.5}), "RS_1") == (5, 15)
    # Three quarters twice are one and a half: 5 s left take 7.5 s, in which RS_1 gets 5 s done.
    found = run(costs, [0, 5], demand={"wire": 0.75})
    assert span(found, "AR_0") == (0, 12.5)
    assert span(found, "RS_1") == (5, 17.5)


def test_compute_slows_down_while_there_is_traffic() -> None:
    # 6 s of RS_0 beside compute at 2/3 of its speed get 4 s of compute done.
    found = run({"RS_0": over(6)}, [0, 10], slowdown={"wire": 0.5})
    (compute,) = [ran for ran in found.compute if ran.module == 1]
    assert (compute.begin_s, compute.end_s) == (0, pytest.approx(12))


def test_packing_holds_compute_before_the_op_is_issued() -> None:
    found = run({"RS_0": OpCost(issue_s=2, latency_s=3)}, [1, 4])
    assert span(found, "RS_0") == (3, 6)
    assert found.duration_s == 7


def test_work_is_neither_lost_nor_made() -> None:
    found = run({f"{kind}_{n}": over(3 + n) for kind in ("RS", "AR") for n in range(5)}, [1, 2, 3, 4, 5])
    begin_s = min(ran.begin_s for ran in found.ops if ran.end_s > ran.begin_s)
    assert found.duration_s - begin_s == pytest.approx(2 * sum(3 + n for n in range(5)))
