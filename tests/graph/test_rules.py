"""Each rule finds what its documentation shows as wrong; slips in the library are found; findings say what they should."""

from __future__ import annotations

import re

import pytest

from commplan import compiler, graph, plan
from commplan.errors import Rule, Severity, Violation
from commplan.language import library
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis
from tests import given


@pytest.mark.parametrize("rule", [*graph.RULES, *plan.RULES], ids=lambda rule: rule.code)
def test_documentation_shows_what_breaks_a_rule_and_what_does_not(rule: Rule) -> None:
    found = given.findings(rule.wrong)
    assert {violation.code for violation in found} == {rule.code}
    assert {violation.severity for violation in found} == {rule.severity}
    assert all(violation.hint for violation in found)
    assert given.findings(rule.right) == ()


def errors(text: str, modules: int | ModuleTable | None = None) -> tuple[Violation, ...]:
    return tuple(v for v in compiler.check(text, modules) if v.severity is Severity.ERROR)


def library_text(name: str) -> str:
    return library.find(name).read_text()


SLIPS = {
    "drop after": [
        ("pipelined_allreduce", "AR_<n-1>: {after: RS_<n-1>}", "AR_<n-1>: {}", set()),  # compute waits for RS_<n-1> above
        ("pipelined_allreduce", "apply_n:  {after: AR_n}", "apply_n: {}", {"CP201"}),
        ("overlapped_allreduce", "AR_n: {after: RS_n}", "AR_n: {}", {"CP201"}),
        ("fsdp2_native", "AR_n:    {after: RS_n}", "AR_n:", {"CP201"}),
        ("fsdp2_native", "apply_n: {after: AR_n, lane: replicate}", "apply_n: {lane: replicate}", set()),  # one lane
        ("single_lane", "AR_n: {after: RS_n, lane: comm}", "AR_n: {lane: comm}", set()),
        ("eager_apply", "apply_<n-1>: {after: AR_<n-1>}", "apply_<n-1>: {}", {"CP201"}),
        ("bucketed_pipeline_depth2", "apply_<n-2>: {after: AR_<n-2>}", "apply_<n-2>: {}", set()),  # waited for above
        ("windowed_allreduce", "apply_<n-k>: {after: AR_<n-k>}", "apply_<n-k>:", {"CP201"}),
        ("delayed_allreduce", "AR_<n-k>: {after: RS_<n-k>}", "AR_<n-k>: {}", set()),
        ("blocking", "AR_n: {after: RS_n}", "AR_n: {}", set()),
    ],
    "drop wait": [
        ("bucketed_pipeline_depth2", "  - wait: RS_<n-1> ", "  # ", set()),  # the after is still there
    ],
    "apply early": [
        ("pipelined_allreduce", "root:", "  - apply_n: {after: RS_n}\nroot:", {"CP206"}),
        ("eager_apply", "apply_<n-1>: {after: AR_<n-1>}", "apply_n: {after: RS_n}", {"CP201"}),
        ("pipelined_allreduce", "apply_n:  {after: AR_n}", "apply_n: {after: RS_n}", {"CP201"}),
        ("bucketed_pipeline_depth2", "apply_<n-2>: {after: AR_<n-2>}", "apply_n: {after: compute_n}", {"CP202"}),
    ],
    "shift an index": [
        ("pipelined_allreduce", "AR_<n-1>: {after: RS_<n-1>}", "AR_<n-1>: {after: RS_<n-2>}", set()),
        ("overlapped_allreduce", "AR_n: {after: RS_n}", "AR_n: {after: RS_<n-1>}", {"CP201"}),
        ("overlapped_allreduce", "AR_n: {after: RS_n}", "AR_<n+1>: {after: RS_n}", {"CP207"}),
        ("overlapped_allreduce", "AR_n: {after: RS_n}", "AR_n: {after: RS_<n+1>}", {"CP102"}),
        ("eager_apply", "apply_<n-1>: {after: AR_<n-1>}", "apply_<n-1>: {after: AR_<n-2>}", {"CP201"}),
        ("eager_apply", "RS_n: {after: compute_n}", "RS_n: {after: compute_<n+1>}", {"CP102"}),
        ("windowed_allreduce", "AR_n: {after: RS_n}", "AR_<n-4>: {after: RS_<n-4>}", {"CP102"}),
    ],
    "another hook": [
        ("pipelined_allreduce", "root:  ", "pre_backward:", {"CP207"}),
    ],
    "another name": [
        ("pipelined_allreduce", "{after: AR_n}", "{after: Ar_n}", {"CP103"}),
        ("pipelined_allreduce", "{after: AR_n}", "{after: AG_n}", {"CP103"}),
    ],
    "drop an op": [
        ("overlapped_allreduce", "  - AR_n: {after: RS_n}", "  #", {"CP103", "CP203"}),
        ("fsdp2_native", "  - apply_n: {after: AR_n, lane: replicate}", "", {"CP205"}),
    ],
}


@pytest.mark.parametrize(
    ("name", "old", "new", "codes"),
    [slip for slips in SLIPS.values() for slip in slips],
    ids=lambda value: (value if isinstance(value, str) else " ".join(sorted(value)))[:40],
)
def test_a_slip_in_the_library_is_found_if_it_matters(name: str, old: str, new: str, codes: set[str]) -> None:
    text = library_text(name)
    assert text.count(old) == 1
    assert {violation.code for violation in errors(text.replace(old, new))} == codes


def test_a_finding_names_both_ops_and_both_places() -> None:
    text = library_text("overlapped_allreduce").replace("AR_n: {after: RS_n}", "AR_n: {}")
    (found,) = errors(text)
    lines = text.splitlines()
    assert "AR_0" in found.message
    assert "RS_0" in found.message
    assert lines[found.span.line - 1][found.span.column - 1 :].startswith("AR_n")
    (writer,) = found.related
    assert lines[writer.span.line - 1][writer.span.column - 1 :].startswith("RS_n")
    assert "`AR_n: {after: RS_n}`" in found.hint


def test_everything_is_found_at_once() -> None:
    text = """\
version: 1
name: many
post_backward:
  - RS_n: {after: AL_n}
  - AR_n
  - AR_n
  - apply_n: {after: RS_<n+1>}
root:
  - wait: Rs_n
"""
    assert {violation.code for violation in errors(text)} == {"CP102", "CP103", "CP204"}
    assert [v.code for v in errors(text)].count("CP103") == 2


def test_one_finding_for_two_lines_however_many_modules() -> None:
    text = library_text("overlapped_allreduce").replace("AR_n: {after: RS_n}", "AR_n: {}")
    assert len(errors(text, 1)) == len(errors(text, 50)) == len(errors(text)) == 1


def test_a_cycle_is_shown_whole_from_its_earliest_written_member() -> None:
    text = """\
version: 1
name: long_cycle
post_backward:
  - RS_n: {after: AR_n}
  - AR_n: {after: x_n}
  - x_n: {kind: apply, after: RS_n}
"""
    (found,) = [violation for violation in errors(text) if violation.code == "CP101"]
    assert (
        re.findall(r"\w+_\d", found.message) == ["RS_0", "AR_0", "x_0", "RS_0"]
        or re.findall(r"\w+_\d+", found.message)[0][:2] == "RS"
    )
    assert found.span.line == 4
    assert len(found.related) == 3


def table(*axes: dict[Axis, int]) -> ModuleTable:
    parameters = (Parameter(name="w", shape=(8, 8)),)
    return ModuleTable(modules=tuple(Module(name=f"m{n}", parameters=parameters, axes=a) for n, a in enumerate(axes)))


HSDP, FSDP, DDP = {Axis.SHARD: 2, Axis.REPLICATE: 2}, {Axis.SHARD: 2}, {Axis.REPLICATE: 2}


@pytest.mark.parametrize("axes", [(FSDP,) * 4, (DDP,) * 4, (HSDP, FSDP, DDP, HSDP, {}), ({},)])
@pytest.mark.parametrize("name", library.names())
def test_the_library_is_right_on_every_mesh(name: str, axes: tuple[dict[Axis, int], ...]) -> None:
    assert not errors(library_text(name), table(*axes))


def test_what_a_module_does_not_need_is_not_missed() -> None:
    text = "version: 1\nname: t\npost_backward:\n  - RS_n: {after: compute_n}\nroot:\n  - apply_n: {after: RS_n}\n"
    assert not errors(text, table(FSDP, FSDP))
    assert {violation.code for violation in errors(text, table(FSDP, HSDP))} == {"CP203"}
    (found,) = errors(text, table(FSDP, HSDP))
    assert "m1" in found.message
