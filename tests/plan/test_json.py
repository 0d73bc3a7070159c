"""Plans as JSON: there and back, the same everywhere, and nothing wrong is let in."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commplan import ModuleTable, PlanError, ScheduleError, compiler
from commplan.language import library
from commplan.plan import OpStep, Plan
from tests.oracle import AXIS_OF, Item, blocked_by, gradients_are_right
from tests.random_schedules import schedules

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("schedule", [*NAMES, GATHERED], ids=lambda text: text.split("\n")[0])
@pytest.mark.parametrize("num_modules", [1, 2, 7])
def test_there_and_back(schedule: str, num_modules: int) -> None:
    plan = compiler.compile(schedule, num_modules)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest == hashlib.sha256(plan.to_json().encode()).hexdigest()
    assert again.text() == plan.text()


@given(schedules(), st.integers(1, 5), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_whatever_compiles_is_valid_on_its_own(text: str, num_modules: int, data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(num_modules))))
    table = ModuleTable(modules=ModuleTable.uniform(num_modules).modules, need_order=order)
    try:
        plan = compiler.compile(text, table)
    except ScheduleError:
        assume(False)
    assert Plan.from_json(plan.to_json()) == plan


@given(st.sampled_from(NAMES), st.permutations(range(6)))
@settings(max_examples=30, deadline=None)
def test_the_library_is_right_for_nested_units(name: str, order: list[int]) -> None:
    table = ModuleTable(modules=ModuleTable.uniform(6).modules, need_order=tuple(order))
    plan = compiler.compile(name, table)
    assert Plan.from_json(plan.to_json()) == plan


def test_digests_tell_plans_apart_and_nothing_else() -> None:
    digests = {(name, n): compiler.compile(name, n).digest for name in NAMES for n in (3, 4)}
    assert len(set(digests.values())) == len(digests)
    assert compiler.compile("delayed_allreduce", 4, k=1).digest != compiler.compile("delayed_allreduce", 4, k=2).digest
    plan = compiler.compile("delayed_allreduce", 4)
    assert replace(plan, schedule=f"{plan.schedule}, renamed").digest != plan.digest
    text = library.find("pipelined_allreduce").read_text()
    assert compiler.compile("# moved\n\n" + text, 4).digest == compiler.compile("pipelined_allreduce", 4).digest


def test_digests_do_not_depend_on_the_order_of_sets() -> None:
    code = (
        "import commplan; from commplan.language import library\n"
        f"print([commplan.compile(name, 9).digest for name in (*library.names(), {GATHERED!r})])"
    )
    found = set()
    for seed in range(10):
        environment = os.environ | {"PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not"),
        ("[]", "format"),
        ("{}", "format"),
        ('{"format": "commplan.plan", "version": 2}', "it has the `version` '2', and only 1 is read"),
        ('{"format": "commplan.plan", "version": 1}', "'schedule' is missing"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Plan.from_json(text)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in JSON data."""
    yield path
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield from places(value, (*path, key))


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


WRONG_TYPES = (None, True, 1.5, -1, 10**30, "x", [], {}, [[]], "AR_0", "RS_99")


@pytest.mark.parametrize("value", WRONG_TYPES, ids=str)
def test_a_value_of_another_type_is_refused_or_makes_no_difference(value: Any) -> None:
    plan = compiler.compile(GATHERED, 2)
    data = json.loads(plan.to_json())
    for path in [path for path in places(data) if path]:
        if path[0] in ("schedule", "params") or path[:1] == ("modules",):
            continue
        changed = copy.deepcopy(data)
        at(changed, path[:-1])[path[-1]] = value
        if changed == data:
            continue
        try:
            accepted = Plan.from_json(json.dumps(changed))
        except PlanError:
            continue
        assert is_right(accepted), path


def mutants(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plans that differ in one place: steps dropped, doubled, swapped, moved; waits, lanes and names changed."""

    def changed() -> dict[str, Any]:
        return copy.deepcopy(data)

    names = [step["op"] for hook in data["hooks"] for step in hook["steps"] if "op" in step]
    for h, hook in enumerate(data["hooks"]):
        for s, step in enumerate(hook["steps"]):
            name = f"{step.get('op', 'wait')} in hook {h}"
            for what, steps in {
                "drop": [*hook["steps"][:s], *hook["steps"][s + 1 :]],
                "double": [*hook["steps"][: s + 1], *hook["steps"][s:]],
                "swap": [*hook["steps"][:s], *hook["steps"][s : s + 2][::-1], *hook["steps"][s + 2 :]],
            }.items():
                one = changed()
                one["hooks"][h]["steps"] = steps
                yield f"{what} {name}", one
            for other in range(len(data["hooks"])):
                one = changed()
                one["hooks"][other]["steps"].append(one["hooks"][h]["steps"].pop(s))
                yield f"move {name} to {other}", one
            for w in range(len(step["waits"])):
                one = changed()
                del one["hooks"][h]["steps"][s]["waits"][w]
                yield f"drop wait {w} of {name}", one
                one = changed()
                del one["hooks"][h]["steps"][s]["waits"][w]
                one["hooks"][h]["steps"][s]["after"] = []
                yield f"drop wait {w} and after of {name}", one
                for target in names:
                    one = changed()
                    one["hooks"][h]["steps"][s]["waits"][w] = target
                    one["hooks"][h]["steps"][s]["after"] = []
                    yield f"retarget wait {w} of {name} to {target}", one
            for key, values in {"lane": ("compute", "shard", "replicate"), "op": names, "kind": KINDS, "axis": AXES}.items():
                for value in values if key in step else ():
                    one = changed()
                    one["hooks"][h]["steps"][s][key] = value
                    yield f"{key} of {name} to {value}", one


KINDS = ("all_gather", "compute", "reduce_scatter", "all_reduce", "apply")
AXES = (None, "shard", "replicate")


def is_right(plan: Plan) -> bool:
    """Whether what an executor does with `plan` gives right gradients, whatever it declares."""
    items = []
    steps = [step for step in plan.steps if isinstance(step, OpStep)]
    for place, hook in enumerate(plan.hooks):
        compute = hook.section == "post_backward"
        items.append(Item(f"compute_{hook.n}" if compute else f"open {place}", "compute"))
        for number, step in enumerate(hook.steps):
            waits = [str(op) for op in step.waits]
            if isinstance(step, OpStep):
                op = step.op
                items.append(Item(str(op), step.lane, "", step.kind, op.members, op.piece, op.pieces, waits))
            else:
                items.append(Item(f"wait {place} {number}", "compute", deps=waits))
    names = [item.name for item in items]
    if len(set(names)) < len(names) or any(dep not in names[:n] for n, item in enumerate(items) for dep in item.deps):
        return False
    if any(step.axis != AXIS_OF[step.kind] or (step.axis and step.lane == "compute") for step in steps):
        return False
    return channels_are_in_order(plan, steps, items) and gradients_are_right(items, len(plan.modules), lambda kind, n: True)


def channels_are_in_order(plan: Plan, steps: list[OpStep], items: list[Item]) -> bool:
    """Whether each communicator runs one op at a time."""
    own = {lane.name for lane in plan.lanes if lane.own_communicator}
    queues: dict[str, list[str]] = {}
    for step in steps:
        if step.axis:
            queues.setdefault(f"{step.axis} {step.lane if step.lane in own else ''}", []).append(str(step.op))
    return all(other in blocked_by(items, one) for queue in queues.values() for one, other in pairwise(queue))


@pytest.mark.parametrize("schedule", [*NAMES, GATHERED], ids=lambda text: text.split("\n")[0])
def test_no_wrong_plan_is_let_in(schedule: str) -> None:
    plan = compiler.compile(schedule, 3)
    assert is_right(plan)
    refused = 0
    for what, data in mutants(json.loads(plan.to_json())):
        try:
            accepted = Plan.from_json(json.dumps(data))
        except PlanError:
            refused += 1
            continue
        assert is_right(accepted), what
    assert refused > 20


def test_errors_name_what_is_wrong() -> None:
    data = json.loads(compiler.compile("pipelined_allreduce", 3).to_json())
    step = data["hooks"][-1]["steps"][-1]
    assert step["op"] == "apply_2"
    step["waits"] = step["after"] = []
    with pytest.raises(PlanError, match="apply_2 may start before AR_2 is complete"):
        Plan.from_json(json.dumps(data))
    step["kind"] = "applied"
    with pytest.raises(PlanError, match=r"plan\.hooks\[3\]\.steps\[\d\]\.kind: expected a kind of op"):
        Plan.from_json(json.dumps(data))


def test_declared_memory_must_be_that_of_the_steps() -> None:
    data = json.loads(compiler.compile("pipelined_allreduce", 3).to_json())
    data["buffers"][1]["size_bytes"] -= 1
    with pytest.raises(PlanError, match="buffer"):
        Plan.from_json(json.dumps(data))


def test_a_table_of_another_model_does_not_fit() -> None:
    data = json.loads(compiler.compile("pipelined_allreduce", 3).to_json())
    data["modules"] = ModuleTable.uniform(4).model_dump(mode="json")
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(data))
