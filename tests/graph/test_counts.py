"""Checking without a module table finds what any number of modules would show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commplan import compiler, graph
from commplan.errors import Severity, Span, Violation
from commplan.language import library, parse, resolve
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.language.spec import ScheduleSpec
from commplan.ops import Axis
from tests.random_schedules import schedules

HSDP, FSDP, DDP = {Axis.SHARD: 2, Axis.REPLICATE: 2}, {Axis.SHARD: 2}, {Axis.REPLICATE: 2}


def key(violation: Violation) -> tuple[str, Span, tuple[Span, ...]]:
    return violation.code, violation.span, tuple(related.span for related in violation.related)


@given(schedules())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_other_number_of_modules_shows_more(text: str) -> None:
    spec = parse(text)
    counts = graph.enough_module_counts(spec, {})
    found = {key(violation) for violation in compiler.check(spec)}
    # Where a dependency is wrong for some number of modules, that it orders too little for another is not told.
    in_doubt = {span.line for code, span, _ in found if code in ("CP101", "CP102", "CP103")}
    for num_modules in (*range(1, max(counts)), max(counts) + 1, 2 * max(counts)):
        more = {key(violation) for violation in compiler.check(spec, num_modules)}
        assert {(code, *rest) for code, *rest in more if code != "CP201" or rest[0].line not in in_doubt} <= found, num_modules


@given(schedules(fused=False), st.lists(st.sampled_from([HSDP, FSDP, DDP, {}]), min_size=1, max_size=5), st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_what_is_right_where_all_ops_run_is_right_where_some_are_left_out(
    text: str, axes: list[dict[Axis, int]], resharded: bool
) -> None:
    assume(not any(violation.severity is Severity.ERROR for violation in compiler.check(text, len(axes))))
    parameters = (Parameter(name="w", shape=(8, 8)),)
    modules = (
        Module(name=f"m{n}", parameters=parameters, axes=mesh, resharded_after_forward=resharded) for n, mesh in enumerate(axes)
    )
    found = compiler.check(text, ModuleTable(modules=tuple(modules)))
    assert not any(violation.severity is Severity.ERROR for violation in found)


FAR = """\
version: 1
name: far
params: {{k: {{default: {k}, min: 1, max: 1024}}}}
post_backward:
  - wait: RS_<n-1>
  - RS_n: {{after: compute_n}}
  - AR_<n-k>: {{after: RS_<n-k>}}
  - {late}
root:
  - apply_n: {{after: AR_n}}
"""


@pytest.mark.parametrize("k", [1, 5, 6, 7, 40, 300])
@pytest.mark.parametrize("nudge", [-1, 0])
def test_a_slip_at_a_large_offset_is_seen(k: int, nudge: int) -> None:
    text = FAR.format(k=k, late=f"wait: AR_<n-{k + nudge}>")
    found = {violation.code for violation in compiler.check(text, params={"k": k})}
    assert found == ({"CP102"} if nudge < 0 else {"CP502"})


def test_params_are_checked_at_their_bounds() -> None:
    text = FAR.format(k=2, late="wait: AR_<n-2>")
    assert {violation.code for violation in compiler.check(text, params={"k": 2})} == {"CP502"}
    assert {violation.code for violation in compiler.check(text)} == {"CP102", "CP502"}


BETWEEN = """\
version: 1
name: between
params: {{m: {{default: {low}, min: {low}, max: {high}}}}}
post_backward:
  - wait: RS_<n-{far}>
  - RS_n: {{after: compute_n, fuse: {{modules: 4}}}}
  - AR_n: {{after: RS_n, fuse: {{modules: m}}}}
root:
  - apply_n: {{after: AR_n}}
"""


@pytest.mark.parametrize(("low", "high"), [(4, 8), (4, 64)])
def test_params_are_checked_between_their_bounds(low: int, high: int) -> None:
    """Buckets of 4 and of 8 (or 64) end together; buckets of 5 do not."""
    text = BETWEEN.format(low=low, high=high, far=8)
    for m, expected in ((low, set()), (5, {"CP102"}), (high, set())):
        assert {v.code for v in compiler.check(text, params={"m": m}) if v.severity is Severity.ERROR} == expected
    assert "CP102" in {violation.code for violation in compiler.check(text)}


MANY = """\
version: 1
name: many
params: {{{params}}}
post_backward:
  - RS_n: {{after: compute_n}}
  - AR_n: {{after: RS_n}}
{waits}
root:
  - apply_n: {{after: AR_n}}
"""


def test_work_is_bounded_however_many_params_there_are() -> None:
    names = "abcdefgh"
    text = MANY.format(
        params=", ".join(f"{n}: {{default: 1, max: 1024}}" for n in names),
        waits="\n".join(f"  - wait: AR_<n-{n}>" for n in names),
    )
    spec = parse(text)
    spent = sum(graph.work_of(spec, binding, counts) for binding, counts in compiler.module_counts(spec, {}))
    # A binding for which too little is left is still checked with one module.
    assert spent <= graph.MAX_WORK + graph.work_of(spec, spec_params(spec), [1])


def spec_params(spec: ScheduleSpec) -> dict[str, int]:
    return {param.name: param.default for param in spec.params}


@dataclass
class Work:
    """Layouts, and nodes and edges in all of them."""

    layouts: int = 0
    size: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()
    build = graph.build

    def counting(*arguments: Any, **options: Any) -> graph.ScheduleGraph:
        made = build(*arguments, **options)
        counted.layouts += 1
        counted.size += len(made.nodes) + sum(map(len, made.predecessors))
        return made

    monkeypatch.setattr(graph, "build", counting)
    return counted


HEAVY = {
    "a circle of many pieces": """\
version: 1
name: circle
params: {k: {default: 2, min: 0, max: 15}}
lanes: {b: {communicator: own}}
pre_backward:
  - RS_<n-k>: {chunks: 1024, fuse: {tail: 636, modules: 1000}, after: [AR_n, AG_n, RS_*, RS_*], lane: b}
  - wait: [apply_n, AG_<n+1>]
post_backward:
  - AR_<n-2>: {after: [RS_*, RS_n, RS_n], fuse: {modules: 7}, chunks: 1024, lane: b}
  - RS_n: {after: compute_n}
root:
  - apply_n: {after: AR_n}
""",
    "as many values of a param as lines": "version: 1\nname: many\nparams: {k: 1}\npost_backward:\n"
    + "  - RS_n: {after: compute_n}\n  - AR_n: {after: RS_n}\n  - wait: AR_<n-k>\n"
    + "".join(f"  - wait: AR_<n-{distance}>\n" for distance in range(1, 400))
    + "root:\n  - apply_n: {after: AR_n}\n",
    "many ops of many pieces": "version: 1\nname: many\npost_backward:\n"
    + "".join(f"  - F{number}_n: {{kind: all_reduce, chunks: 1024}}\n" for number in range(200)),
    "right, in many pieces": """\
version: 1
name: right
params: {k: {default: 2, min: 1, max: 16}}
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n, chunks: 1024}
  - AR_<n-k>: {after: RS_<n-k>, chunks: 1024}
root:
  - apply_n: {after: AR_n}
""",
}


@pytest.mark.parametrize("modules", [None, 5])
@pytest.mark.parametrize("text", HEAVY.values(), ids=HEAVY.keys())
def test_no_file_takes_more_than_its_share_of_work(text: str, modules: int | None, work: Work) -> None:
    """What a layout takes is estimated before it is made; the estimate may be off by this much."""
    compiler.check(text, modules)
    assert work.size <= 3 * graph.MAX_WORK


def test_params_that_no_line_uses_are_not_tried(work: Work) -> None:
    text = FAR.format(k=2, late="wait: AR_<n-2>").replace("params: {", "params: {unused: {default: 1, min: 0, max: 12}, ")
    compiler.check(text, 5, params={"k": 2})
    assert work.layouts == 2  # the other one for what grows with the number of modules


def test_a_large_model_is_checked_with_every_value_of_a_param(work: Work) -> None:
    spec = resolve("delayed_allreduce")
    compiler.check(spec, 500)
    assert work.layouts == len(list(compiler.bindings(spec, {}))) + 1


@given(schedules(), st.integers(5, 9), st.integers(10, 12), st.integers(1, 6))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_few_pieces_show_what_all_show(text: str, some: int, more: int, num_modules: int) -> None:
    spec = parse(text.replace("chunks: 2", f"chunks: {some}").replace("chunks: 3", f"chunks: {more}"))
    table = ModuleTable.uniform(num_modules)
    few, whole = (graph.check(graph.build(spec, table, {}, all_pieces=every)) for every in (False, True))
    assert {key(violation) for violation in few} == {key(violation) for violation in whole}


def test_pieces_are_named_as_they_are() -> None:
    text = HEAVY["right, in many pieces"].replace("AR_<n-k>: {after: RS_<n-k>, chunks: 1024", "AR_<n-k>: {chunks: 512")
    (violation,) = compiler.check(text.replace("wait: RS_<n-1>", "wait: AR_<n-9>"), 5, params={"k": 1})
    assert "AR_0[0/512]" in violation.message
    assert "RS_0[1023/1024]" in violation.message


@pytest.mark.parametrize("name", sorted({*library.names()} - {"blocking", "deferred_allreduce"}))
def test_the_library_is_free_of_findings_for_every_small_model(name: str) -> None:
    spec = resolve(name)
    assert not compiler.check(spec)
    for binding in compiler.bindings(spec, {}):
        for num_modules in range(1, 12):
            made = graph.build(spec, ModuleTable.uniform(num_modules), binding)
            assert not graph.check(made)
