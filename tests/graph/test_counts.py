"""Checking without a module table finds what any number of modules would show."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from commplan import compiler, graph
from commplan.errors import Severity, Span, Violation
from commplan.language import library, parse, resolve
from commplan.language.modules import Module, ModuleTable, Parameter
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
    for num_modules in (*range(1, max(counts)), max(counts) + 1, 2 * max(counts)):
        more = compiler.check(spec, num_modules)
        assert {key(violation) for violation in more} <= found, num_modules


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


@pytest.mark.parametrize("name", [name for name in library.names() if name != "blocking"])
def test_the_library_is_free_of_findings_for_every_small_model(name: str) -> None:
    spec = resolve(name)
    assert not compiler.check(spec)
    for binding in compiler.bindings(spec, {}):
        for num_modules in range(1, 12):
            made = graph.build(spec, ModuleTable.uniform(num_modules), binding)
            assert not graph.check(made)
