"""What a plan keeps in memory, against windows, caps and the number of modules."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import commplan
from commplan import CommplanError, compiler
from commplan.errors import Severity, Violation
from commplan.language import library
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis
from commplan.plan import BufferKind, Plan
from commplan.plan.model import COMMUNICATION
from commplan.plan.peak import peak
from tests.random_schedules import schedules

MB = 10**6
LIBRARY = {name: library.find(name).read_text() for name in library.names()}


def table(num_modules: int, shard_bytes: int) -> ModuleTable:
    """Modules whose reduced shard, on one of two ranks, is so large."""
    parameters = (Parameter(name="w", shape=(shard_bytes // 4 * 2,)),)
    axes = {Axis.SHARD: 2, Axis.REPLICATE: 2}
    return ModuleTable(modules=tuple(Module(name=f"m{n}", parameters=parameters, axes=axes) for n in range(num_modules)))


def found(schedule: str, modules: ModuleTable | int | None, cap_bytes: int | None = None) -> dict[str, Violation]:
    return {v.code: v for v in compiler.check(schedule, modules, memory_cap_bytes=cap_bytes)}


# 24 modules of 34 MB reduced gradient each, all-reduces as slow as they like (pytorch#179443, #183617).


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_window_bounds_reduced_gradients(k: int) -> None:
    plan = commplan.compile("windowed_allreduce", table(24, 34 * MB), k=k)
    assert plan.peak_bytes_of(BufferKind.SHARD) == 34 * MB * k
    assert plan.peak_bytes == 34 * MB * k + 68 * MB  # and the input of one reduce-scatter


@pytest.mark.parametrize("name", ["overlapped_allreduce", "pipelined_allreduce", "fsdp2_native"])
def test_without_a_window_all_are_kept(name: str) -> None:
    assert commplan.compile(name, table(24, 34 * MB)).peak_bytes_of(BufferKind.SHARD) == 816 * MB


@pytest.mark.parametrize("name", library.names())
@pytest.mark.parametrize("shard_bytes", [4, 34 * MB])
def test_the_peak_is_within_its_own_cap_and_no_smaller_one(name: str, shard_bytes: int) -> None:
    modules = table(24, shard_bytes)
    peak_bytes = commplan.compile(name, modules).peak_bytes
    assert "CP401" not in found(name, modules, peak_bytes)
    finding = found(name, modules, peak_bytes - 1)["CP401"]
    assert finding.severity is Severity.ERROR
    assert f"{peak_bytes:,} bytes" in finding.message
    assert finding.hint


def test_what_a_finding_says_to_write_fits_the_cap() -> None:
    modules = table(24, 34 * MB)
    finding = found("overlapped_allreduce", modules, 400 * MB)["CP401"]
    assert "post_backward 23" in finding.message
    assert "24 reduced shards on lane shard" in finding.message
    match = re.match(r"`- (.+?)` above RS_n", finding.hint)
    assert match is not None
    text = LIBRARY["overlapped_allreduce"].split("root:")[0].replace("  - RS_n", f"  - {match[1]}\n  - RS_n")
    assert compiler.check(text, modules, memory_cap_bytes=400 * MB) == ()
    assert commplan.compile(text, modules).peak_bytes > 400 * MB - 34 * MB  # no more modules would fit


def test_a_cap_needs_modules() -> None:
    with pytest.raises(CommplanError, match="modules"):
        compiler.check("blocking", memory_cap_bytes=1)


def test_a_cap_is_for_params_as_they_will_be() -> None:
    modules = table(24, 34 * MB)
    assert "CP401" not in found("windowed_allreduce", modules, 34 * MB * 3 + 68 * MB)
    over = compiler.check("windowed_allreduce", modules, {"k": 4}, memory_cap_bytes=34 * MB * 3 + 68 * MB)
    assert [violation.code for violation in over] == ["CP401"]


# Partial sums.


def skipping(name: str, *families: str) -> str:
    """A schedule of the library that runs these ops in the last backward only."""
    return re.sub(rf"({'|'.join(families)})_(\S+):( +){{", r"\1_\2:\3{when: last_backward, ", LIBRARY[name])


OTHERWISE = {"bucketed_allreduce", "shrunken_tail", "reduce_interval", "last_microbatch_allreduce"}
"""Where buckets, or several inputs at once, outweigh partial sums, and where there are some already."""

PLAIN = sorted({*library.names()} - OTHERWISE)


@pytest.mark.parametrize("families", [("AR",), ("RS", "AR")])
@pytest.mark.parametrize("name", PLAIN)
def test_a_finding_about_partial_sums_tells_how_to_get_rid_of_them(name: str, families: tuple[str, ...]) -> None:
    modules = table(24, 34 * MB)
    text = skipping(name, *families)
    plan = commplan.compile(text, modules)
    kept_bytes = (34 if families == ("AR",) else 68) * 24 * MB
    assert plan.partial_sum_bytes == kept_bytes
    assert plan.peak_bytes > kept_bytes
    finding = found(text, modules, kept_bytes)["CP401"]
    skipped = families[0]
    assert f"take `when: last_backward` away from {skipped}: " in finding.hint
    assert text.splitlines()[finding.span.line - 1].strip().startswith(f"- {skipped}_")
    parts = {"AR": "partial sum|reduced shard", "RS": "24 unsharded gradients"}[skipped]
    assert re.search(parts, finding.message)
    backwards = {"every": "", "earlier": " of a backward before the last", "last": " of the last backward"}
    assert f"peaks in {plan.peak_hook}{backwards[plan.peak_backwards]} at" in finding.message
    followed = commplan.compile(skipping(name, *families[1:]) if families[1:] else LIBRARY[name], modules)
    assert followed.partial_sum_bytes < kept_bytes


@pytest.mark.parametrize("name", PLAIN)
def test_partial_sums_grow_with_the_model(name: str) -> None:
    shards, whole = skipping(name, "AR"), skipping(name, "RS", "AR")
    assert "CP402" not in found(shards, None)
    assert "CP402" in found(shards, 3, 2**40)
    for modules, cap_bytes in ((None, None), (3, 2**40)):
        finding = found(whole, modules, cap_bytes)["CP402"]
        assert "unsharded gradient is kept from one backward to the next" in finding.message
        assert "take `when: last_backward` away from RS" in finding.hint


@given(schedules(), st.integers(1, 6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_peak_taken_apart_is_the_whole_of_it(text: str, num_modules: int) -> None:
    plan = compiled(text, num_modules)
    top = peak(plan)
    assert sum(share.size_bytes for share in top.shares) == top.size_bytes == plan.peak_bytes
    assert (str(top.hook), top.backwards) == (str(plan.peak_hook), plan.peak_backwards)


# Growth.


def compiled(text: str, num_modules: int) -> Plan:
    try:
        return compiler.compile(text, num_modules)
    except commplan.ScheduleError:
        assume(False)
        raise


def grows(text: str, *kinds: BufferKind) -> bool:
    """Whether ever more modules need ever more memory."""
    sizes = [compiled(text, num_modules).peak_bytes_of(*kinds) for num_modules in (70, 140)]
    return sizes[0] < sizes[1]


WHOLE = (BufferKind.GRADIENT, BufferKind.RS_INPUT)


@given(schedules(gathers=False))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_growth_is_found_where_larger_models_show_it_and_nowhere_else(text: str) -> None:
    assume(not any(v.severity is Severity.ERROR for v in compiler.check(text)))
    assert ("CP402" in found(text, None)) == grows(text, *WHOLE)
    assert ("CP402" in found(text, 2, 2**40)) == grows(text, *COMMUNICATION)


@pytest.mark.parametrize("name", library.names())
def test_reduced_shards_until_root_are_named_where_memory_is_short(name: str) -> None:
    assert "CP402" not in found(name, None)
    assert ("CP402" in found(name, 3, 2**40)) == grows(LIBRARY[name], BufferKind.SHARD)


def test_what_an_axis_that_is_lacking_would_need_is_not_counted() -> None:
    text = LIBRARY["eager_apply"].replace("  - wait: RS_<n-1>                    # one RS input at a time\n", "")
    parameters = (Parameter(name="w", shape=(8, 8)),)
    replicated = (Module(name=f"m{n}", parameters=parameters, axes={Axis.REPLICATE: 2}) for n in range(4))
    assert set(found(text, ModuleTable(modules=tuple(replicated)))) == {"CP304"}
