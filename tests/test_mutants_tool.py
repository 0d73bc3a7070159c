"""tools/mutants: its oracle on cases told from the language, its table, and that it would notice a checker that sleeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from commplan import PlanError, ScheduleError, compiler, graph
from commplan.errors import Severity
from commplan.language import library, parse
from commplan.plan import Plan, validate
from tests.oracle import Layout, is_right
from tests.random_schedules import schedules

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from mutants_run import __main__ as tool
from mutants_run import buffer_mutants, oracle, plan_mutants, schedule_mutants, trial, values
from mutants_run.world import Unit, World

BOTH = ("replicate", "shard")
THREE = World.of(*[Unit()] * 3)


def plain(text: str) -> dict[str, object]:
    return schedule_mutants.normal(YAML(typ="safe", pure=True).load(text))


def schedule(*lines: str, root: str = "") -> dict[str, object]:
    text = "version: 1\nname: x\npost_backward:\n" + "".join(f"  - {line}\n" for line in lines)
    return plain(text + (f"root:\n  - {root}\n" if root else ""))


RS, AR, APPLY = "RS_n: {after: compute_n}", "AR_n: {after: RS_n}", "apply_n: {after: AR_n}"


@pytest.mark.parametrize(
    ("lines", "root", "fault"),
    [
        ((RS, AR), APPLY, ""),
        ((RS, AR, APPLY), "", ""),
        ((RS, "AR_<n-1>: {after: RS_<n-1>}"), APPLY, ""),
        ((RS, "wait: RS_n", "AR_n"), APPLY, ""),
        ((RS, "AR_n: {lane: shard}"), APPLY, ""),
        ((RS, "AR_n"), APPLY, "AR_0-0[0/1] may start before RS_0-0[0/1] is over: both use the shard of module 0"),
        ((RS, "wait: RS_<n-1>", "AR_n"), APPLY, "both use the shard"),
        ((AR, RS, APPLY), "", ""),
        ((RS, APPLY, AR), "", ""),
        (
            (RS, "apply_n: {after: RS_n}", "AR_n: {after: apply_n}"),
            "",
            "AR_0-0[0/1] reads the shard of module 0, which is not there",
        ),
        ((RS,), "apply_n: {after: RS_n}", "module 0 gets a wrong gradient"),
        ((RS, AR), "", "module 0 gets no gradient"),
        ((RS, AR, "x_n: {kind: all_reduce, after: AR_n}"), "apply_n: {after: x_n}", "module 0 gets a wrong gradient"),
        ((RS, AR, "x_n: {kind: apply, after: AR_n}"), "apply_n: {after: x_n}", "reads the shard of module 0"),
        ((RS, "x_n: {kind: all_reduce, axis: shard, after: RS_n}"), "apply_n: {after: x_n}", "wrong gradient"),
        ((RS, AR, RS), APPLY, "RS is placed twice"),
        (("RS_n: {after: AR_n}", AR), APPLY, "in a circle"),
        ((RS, "AR_<n-1>: {after: RS_n}"), APPLY, ""),
        ((RS, "wait: AR_n", "AR_<n-1>: {after: RS_<n-1>}"), APPLY, "issued later"),
        ((RS, "AR_<n+1>: {after: RS_n}"), APPLY, "all_reduce of n+1 in post_backward"),
        (("RS_n: {after: compute_n, chunks: 2}", "AR_n: {after: RS_n, chunks: 3}"), APPLY, ""),
        ((RS, "AR_n: {after: RS_n, fuse: {modules: 2}}", APPLY), "", "issued later"),
        (("RS_n: {after: compute_n, when: last_backward}", AR), APPLY, "which is not there"),
        ((RS, "AR_n: {after: RS_n, when: last_backward}"), APPLY, ""),
    ],
)
def test_the_oracle_on_cases_told_from_the_language(lines: tuple[str, ...], root: str, fault: str) -> None:
    found = oracle.schedule_fault(schedule(*lines, root=root), {}, THREE)
    assert (found == "") == (fault == ""), found
    assert fault in found


def test_gathers_are_due_before_backward() -> None:
    text = "version: 1\nname: x\npre_backward:\n{}post_backward:\n  - {}\n  - {}\n  - {}\n"
    late = plain(text.format("  - AG_n\n", RS, AR, APPLY))
    assert "both use the parameters of module 0" in oracle.schedule_fault(late, {}, THREE)
    in_time = plain(text.format("  - AG_<n+1>\n  - wait: AG_n\n", RS, AR, APPLY))
    assert oracle.schedule_fault(in_time, {}, THREE) == ""


def test_symbolic_collectives() -> None:
    whole = values.computed(BOTH, 0)
    shard = values.collective("reduce_scatter", whole, BOTH, "shard")
    assert [part for ((part, _),) in shard] == [0, 1, 0, 1]
    assert values.collective("all_reduce", shard, BOTH, "replicate") == values.wanted(BOTH, 1)
    twice = values.collective("all_reduce", values.wanted(BOTH, 1), BOTH, "replicate")
    assert twice not in (values.GARBAGE, values.wanted(BOTH, 1))
    assert values.collective("all_reduce", shard, BOTH, "shard") == values.GARBAGE
    swapped = values.collective("all_reduce", values.collective("reduce_scatter", whole, BOTH, "replicate"), BOTH, "shard")
    assert swapped != values.wanted(BOTH, 1)


@given(schedules(), st.integers(1, 5))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_two_oracles_and_the_checker_agree_on_random_schedules(text: str, num_modules: int) -> None:
    fault = oracle.schedule_fault(plain(text), {}, World.of(*[Unit()] * num_modules))
    assert (fault == "") == is_right(Layout(parse(text), num_modules, {})), fault
    refused = [v for v in compiler.check(text, num_modules) if v.severity is Severity.ERROR]
    assert (fault == "") == (not refused), (fault, refused)


@pytest.mark.parametrize("name", library.names())
def test_the_text_of_a_schedule_means_the_same(name: str) -> None:
    text = schedule_mutants.text(plain(library.find(name).read_text()))
    assert compiler.compile(text, 4).hooks == compiler.compile(name, 4).hooks


def test_every_operator_makes_mutants_that_differ() -> None:
    data = plain((Path(__file__).parent / "cases" / "ok" / "every_form.yaml").read_text())
    before = schedule_mutants.text(data)
    for name, mutants in schedule_mutants.OPERATORS.items():
        texts = [schedule_mutants.text(mutant) for mutant in mutants(data, {"k": 2, "d": 1, "c": 4, "m": 3})]
        assert set(texts) - {before}, name
    assert schedule_mutants.text(data) == before
    plan = json.loads(compiler.compile("delayed_allreduce", 3).to_json())
    shown = json.dumps(plan)
    assert all(any(json.dumps(m) != shown for m in mutants(plan)) for mutants in plan_mutants.OPERATORS.values())
    assert json.dumps(plan) == shown
    assert set(schedule_mutants.OPERATORS) == set(plan_mutants.OPERATORS)


def test_every_operator_on_memory_makes_mutants_that_differ_and_none_is_let_in() -> None:
    text = (
        library.find("pipelined_allreduce").read_text().replace("{after: RS_<n-1>}", "{after: RS_<n-1>, when: last_backward}")
    )
    plan = json.loads(compiler.compile(text, 3).to_json())
    shown = json.dumps(plan)
    for name, mutants in buffer_mutants.OPERATORS.items():
        found = [mutant for mutant in mutants(plan) if mutant["buffers"] != plan["buffers"]]
        assert len(found) >= 10, name
        for mutant in found:
            with pytest.raises(PlanError, match="buffer"):
                Plan.from_json(json.dumps(mutant))
    assert json.dumps(plan) == shown


@pytest.mark.usefixtures("small")
def test_a_plan_that_declares_any_memory_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate._Order, "memory", lambda check: iter(()))
    assert tool.main(["least", "--jobs", "1"]) == 1
    assert "buffers, wrong but accepted, with" in capsys.readouterr().out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WORLDS", trial.WORLDS[:3])
    monkeypatch.setattr(trial, "PLAN_WORLDS", trial.PLAN_WORLDS[:1])
    monkeypatch.setattr(trial, "MORE_COUNTS", trial.MORE_COUNTS[:1])
    monkeypatch.setattr(trial, "UNIFORM", trial.UNIFORM[:3])


@pytest.mark.usefixtures("small")
def test_a_schedule_without_disagreements(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["least", "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if line.startswith("YAML: all")).split()
    mutants, wrong, refused, missed, wrongly_refused = map(int, row[2:])
    assert mutants > wrong == refused > 50
    assert missed == wrongly_refused == 0


@pytest.mark.usefixtures("small")
def test_a_checker_that_sleeps_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(graph, "check", lambda made: ())
    assert tool.main(["least", "--jobs", "1"]) == 1
    assert "YAML, wrong but accepted, with" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_a_checker_that_refuses_everything_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compiler.check("version: 1\nname: x\nroot: [AR_n]\n", 1)
    monkeypatch.setattr(trial, "PLAN_WORLDS", ())

    def refuse(*_: object) -> Plan:
        raise ScheduleError(found)

    monkeypatch.setattr(compiler, "compile", refuse)
    assert tool.main(["least", "--jobs", "1"]) == 1
    assert "YAML, wrongly refused, with" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["apply_0", "AG_0"])
def test_only_reductions_have_a_when(op: str) -> None:
    text = library.find("eager_apply").read_text() + "pre_backward:\n  - AG_n\n  - wait: AG_n\n"
    data = json.loads(compiler.compile(text, 2).to_json())
    step = next(step for hook in data["hooks"] for step in hook["steps"] if step.get("op") == op)
    step["when"] = "last_backward"
    with pytest.raises(PlanError, match=f"{op}: it has no `when` of its own"):
        Plan.from_json(json.dumps(data))
