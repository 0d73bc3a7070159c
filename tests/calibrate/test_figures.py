"""From measurements to a profile: what is shared, slowed and missing, and that the text says where each figure is from."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest

import commplan
from commplan.calibrate.figures import Backward, Beside, Measurements, profile_of
from commplan.calibrate.statistics import Spread
from commplan.calibrate.sweep import Measured, Swept
from commplan.language.modules import ModuleTable
from commplan.language.profile_text import profile_text
from commplan.language.profiles import MAX_DEVIATION, Profile, parse_profile
from commplan.ops import Axis, Kind
from commplan.simulate import costs, simulate

TABLE = ModuleTable.uniform(3)
NAMES = [module.name for module in TABLE.modules]
MODULE = TABLE.modules[0]


def spread(seconds: float) -> Spread:
    return Spread(seconds, seconds * 0.9, seconds * 1.1, 5)


def swept(crowded: float | None = 1.0, **kinds: list[tuple[int, float]]) -> Swept:
    default = {"all_gather": [(1024, 1e-3), (1 << 22, 1e-2)], "reduce_scatter": [(1024, 1e-3), (1 << 22, 2e-2)]}
    found = {**default, "all_reduce": [(1024, 2e-3), (1 << 21, 4e-2)], **kinds}
    axes = {Kind.ALL_GATHER: Axis.SHARD, Kind.REDUCE_SCATTER: Axis.SHARD, Kind.ALL_REDUCE: Axis.REPLICATE}
    points = {(axes[Kind(k)], Kind(k)): [Measured(size, spread(s)) for size, s in of] for k, of in found.items() if of}
    return Swept(points, dict.fromkeys(points, "float32"), crowded)


BESIDE = Beside(
    alone_s=0.3,
    compute_s=0.36,
    hidden_s={"shard": 0.12, "replicate": 0.12},
    any_hidden_s=0.24,
    overhead_s=0.009,
    num_issued=9,
    pack_s=0.001,
    unpack_s=0.002,
    write_s=0.003,
    num_written=3,
)


def measured(**changes: Any) -> Measurements:
    compute = {name: spread(0.1) for name in NAMES}
    beside = changes.pop("beside", BESIDE)
    whole = Measurements(
        table=TABLE,
        compute=compute,
        gathers={},
        swept=swept(),
        beside=beside,
        packed_bytes=3 * MODULE.reduced_bytes,
        unpacked_bytes=3 * MODULE.gathered_bytes,
        device="cpu",
        name="it",
        source=["a line", "another"],
    )
    return replace(whole, **changes)


def profile(**changes: Any) -> Profile:
    made, comments = profile_of(measured(**changes))
    text = profile_text(made, comments)
    read = parse_profile(text)
    assert read.axes.keys() == made.axes.keys()
    return read


def test_axes_that_are_as_fast_side_by_side_share_nothing() -> None:
    found = profile()
    assert {axis: costs.link for axis, costs in found.axes.items()} == {Axis.SHARD: "shard", Axis.REPLICATE: "replicate"}
    assert all(link.demand == 1 for link in found.links.values())


@pytest.mark.parametrize(("crowded", "demand"), [(1.5, 0.75), (2.0, 1.0), (6.0, 1.0)])
def test_axes_that_slow_each_other_share_a_link(crowded: float, demand: float) -> None:
    """Under the profile the simulator has two equal collectives beside one another take as much longer, at most twice."""
    found = profile(swept=swept(crowded))
    assert {costs.link for costs in found.axes.values()} == {"shared"}
    assert found.links.get("shared", None) is not None
    assert found.links["shared"].demand == pytest.approx(demand)


def test_a_slowdown_makes_simulated_compute_as_slow_as_it_was() -> None:
    """0.3 s alone, 0.36 s beside 0.24 s of communication, one link at a time: 0.24 / (1 + s) + 0.12 = 0.3."""
    found = profile(beside=replace(BESIDE, overhead_s=0.0))
    assert found.links["shard"].slowdown == pytest.approx(1 / 3, rel=1e-3)
    assert found.links["replicate"].slowdown == found.links["shard"].slowdown
    assert profile(beside=replace(BESIDE, compute_s=0.29)).links["shard"].slowdown == 0


def test_jitter_is_that_of_a_normal_distribution_with_such_a_middle_half() -> None:
    """Of three modules that differ by a tenth to either side; and of collectives four in a row, which differ half as much."""
    one = NormalDist(1.0, 0.1482602).quantiles(4)
    assert (one[0], one[2]) == pytest.approx((0.9, 1.1))
    points = {key: [replace(p, in_row=4) for p in of] for key, of in swept().points.items()}
    found = profile(swept=replace(swept(), points=points))
    assert found.compute_s.jitter == pytest.approx(0.1483, abs=1e-4)
    assert found.links["shard"].jitter == found.links["replicate"].jitter == pytest.approx(2 * 0.1483, abs=2e-4)


def test_jitter_that_no_profile_can_say_is_the_most_that_one_can() -> None:
    """Three repeats of twenty in a row, one of which was held up."""
    spread = Spread.of([1e-4, 1.1e-4, 9e-4])
    points = {key: [replace(p, spread=spread, in_row=20) for p in of] for key, of in swept().points.items()}
    found = profile(swept=replace(swept(), points=points))
    assert found.links["shard"].jitter == MAX_DEVIATION


def test_what_is_always_the_same_has_no_jitter() -> None:
    points = {key: [replace(p, spread=Spread.of([1.0])) for p in of] for key, of in swept().points.items()}
    found = profile(swept=replace(swept(), points=points), compute={name: Spread.of([0.1] * 3) for name in NAMES})
    assert not found.has_jitter


def test_what_the_host_does() -> None:
    found = profile().host
    assert found.issue_s == pytest.approx(0.001)
    assert found.pack_bytes_per_s == pytest.approx(3 * MODULE.reduced_bytes / 0.001, rel=1e-3)
    assert found.unpack_bytes_per_s == pytest.approx(3 * MODULE.gathered_bytes / 0.002, rel=1e-3)
    assert found.apply_s == pytest.approx(0.001)
    nothing = profile(beside=replace(BESIDE, pack_s=0.0, unpack_s=0.0)).host
    assert (nothing.pack_bytes_per_s, nothing.unpack_bytes_per_s) == (None, None)
    alone = profile(beside=replace(BESIDE, pack_s=0.0), memory_bytes_per_s=5e9).host
    assert (alone.pack_bytes_per_s, alone.unpack_bytes_per_s) == (5e9, found.unpack_bytes_per_s)
    assert not alone.packs_lone
    # Its time is not lost.
    assert alone.issue_s == pytest.approx(0.009 / 9)
    in_place = profile(unpacked_bytes=0, memory_bytes_per_s=5e9).host
    assert (in_place.unpack_bytes_per_s, in_place.pack_bytes_per_s) == (5e9, found.pack_bytes_per_s)
    assert in_place.issue_s == pytest.approx((0.009 + 0.002) / 9, rel=1e-3)
    assert profile(device="cuda").host.packs_lone
    assert profile(beside=None).host.issue_s == 0


def test_points_rise_even_if_measurements_do_not() -> None:
    found = profile(swept=swept(all_reduce=[(1024, 3e-3), (4096, 1e-3), (8192, 5e-3)]))
    assert found.transfer(Axis.REPLICATE, Kind.ALL_REDUCE).points == ((1024, 2e-3), (4096, 2e-3), (8192, 5e-3))


def test_fsdp2s_gathers_are_waits_and_copies() -> None:
    gathers = {name: spread(0.05) for name in NAMES}
    copied = {"fsdp2_copied_bytes": 600, "fsdp2_copied_s": 0.3}
    found = profile(gathers=gathers, **copied)
    own = found.axes[Axis.SHARD].fsdp2_all_gather
    assert own is not None
    assert sum(own.seconds(MODULE.gathered_bytes)) == pytest.approx(0.05, rel=1e-3)
    assert found.host.fsdp2_copy_bytes_per_s == 2000
    alone = profile(gathers=gathers, beside=None, **copied).host
    assert alone.model_dump(exclude_defaults=True) == {"fsdp2_copy_bytes_per_s": 2000}
    assert profile(gathers=gathers).host.fsdp2_copy_bytes_per_s is None
    assert profile(device="cuda").fsdp2_gathers == "prefetched"


def test_a_profile_says_what_it_makes_of_the_backwards_it_is_from() -> None:
    plan = commplan.compile("blocking", TABLE)
    found = profile(backwards=[Backward(plan, spread(1.0))], notes=["something was left out"])
    told_s = simulate(plan, costs(plan, found)).duration_s
    assert f"this profile says {told_s * 1e3:.3g} ms" in found.source
    assert found.source.startswith(
        "a line\nanother\nnote: something was left out\ncheck: a backward under blocking took 1000 ms"
    )
    lacking = profile(backwards=[Backward(plan, spread(1.0))], swept=swept(None, all_reduce=[]))
    assert "add axes.replicate.all_reduce" in lacking.source
