"""`tools/bench simulator`: a profile is found again from backwards that follow it, and errors are counted right."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import commplan
from commplan.language import library
from commplan.language.profiles import Profile
from commplan.ops import Axis, Kind
from commplan.simulate import Simulated, costs, report, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from bench_run import truth, truth_figures
from bench_run.truth_figures import CALIBRATION, Row, Setting

KNOWN = Setting(180, 400)
ROUNDS = 2
HOOKS_S = 0.001
COPY_BYTES_PER_S = 6e7
LATENCY_S = {"rs_small": 1e-4, "ar_small": 4e-4, "ag_small": 2e-4}
TABLE = truth_figures.table_of(12, 256, 2, 2)
MODULE = TABLE.modules[0]


def profile(setting: Setting) -> Profile:
    """One that a calibration can find: nothing shared."""
    return Profile.model_validate(
        {
            "name": "so it is",
            "compute_s": {"default": setting.compute_ms / 1e3 + HOOKS_S},
            "axes": {
                "shard": {
                    "link": "host",
                    "all_gather": {"latency_s": LATENCY_S["ag_small"], "bytes_per_s": 5e7},
                    "fsdp2_all_gather": {"latency_s": LATENCY_S["ag_small"], "bytes_per_s": 2e7},
                    "reduce_scatter": {"latency_s": LATENCY_S["rs_small"], "bytes_per_s": 3e7},
                },
                "replicate": {
                    "link": "network",
                    "all_reduce": {"latency_s": LATENCY_S["ar_small"], "bytes_per_s": 1e6 * setting.rate_mbit / 400},
                },
            },
            "host": {
                "issue_s": 0.002,
                "apply_s": 0.003,
                "fsdp2_copy_bytes_per_s": 4e7,
                "pack_bytes_per_s": COPY_BYTES_PER_S,
                "unpack_bytes_per_s": COPY_BYTES_PER_S,
                "packs_lone": False,
            },
            "fsdp2_gathers": "blocking",
        }
    )


def ran(schedule: str, setting: Setting) -> dict[str, Any]:
    """What the two hosts would say of a schedule, if they followed the profile."""
    plan = commplan.compile(schedule, TABLE)
    simulated = simulate(plan, costs(plan, profile(setting)))
    told = report(simulated)
    trace = {
        "compute": slept(simulated, setting),
        "ops": {op.op: [op.issued_s * 1e3, op.begin_s * 1e3, op.end_s * 1e3] for op in told.ops},
        "waits": [[w.begin_s * 1e3, w.end_s * 1e3] for w in told.compute_waits],
        "gathers": {w.op: [w.begin_s * 1e3, w.end_s * 1e3] for w in told.compute_waits if w.op.startswith("FSDP2")},
        "end": told.duration_s * 1e3,
        "stats": {"commplan/compute_wait_s": told.compute_wait_s()},
    }
    return {"duration_s": told.duration_s, "peak_bytes": told.peak_bytes, "traces": [trace] * ROUNDS}


def saw(setting: Setting, schedules: Sequence[str]) -> dict[str, Any]:
    """What four ranks would say of them."""
    found = {name: ran(name, setting) for name in schedules}
    durations_s = {name: of_one["duration_s"] for name, of_one in found.items()}
    alone_s = {name: latency_s * len(TABLE.modules) for name, latency_s in LATENCY_S.items()}
    cost = profile(setting)
    for name, axis, kind, size_bytes in (
        ("rs", Axis.SHARD, Kind.REDUCE_SCATTER, MODULE.reduced_bytes),
        ("ar", Axis.REPLICATE, Kind.ALL_REDUCE, MODULE.shard_bytes),
    ):
        alone_s[name] = sum(cost.transfer(axis, kind).seconds(size_bytes)) * len(TABLE.modules)
    alone_s["copies"] = sum(module.reduced_bytes for module in TABLE.modules) / COPY_BYTES_PER_S
    return {
        "times_s": {name: [[taken_s] * ROUNDS] * 4 for name, taken_s in (durations_s | alone_s).items()},
        "seen": {name: [of_one] * 4 for name, of_one in found.items()},
    }


def slept(simulated: Simulated, setting: Setting) -> list[list[float]]:
    """Compute without the copies of FSDP2's that come before it."""
    ends = [one.end_s * 1e3 for one in simulated.compute if one.module >= 0]
    return [[end - setting.compute_ms, end] for end in ends]


def test_a_profile_is_found_again_and_predicts_every_schedule_in_every_setting() -> None:
    found = truth_figures.calibrated(saw(KNOWN, CALIBRATION), TABLE.modules[0], KNOWN)
    rows: list[Row] = []
    for setting in (KNOWN, Setting(60, 400), Setting(180, 800), Setting(20, 100)):
        moved = truth_figures.moved(found, KNOWN, setting)
        rows += truth_figures.compared(saw(setting, library.names()), moved, TABLE, setting, CALIBRATION)
    figures = truth_figures.figures(rows, rows)
    assert figures["max_error"] < 1e-9
    assert figures["max_exposed_error"] < 1e-9
    assert figures["kendall_tau"] == 1
    assert figures["num_peaks_wrong"] == 0
    assert len(figures["rows"]) == 4 * len(library.names())
    assert all("mean 0.0%, largest 0.0%" in line for line in truth_figures.shown(figures)[-2:])


def test_jitter_of_compute_is_of_all_that_it_is_applied_to_and_as_long_where_compute_is_shorter() -> None:
    begins_ms = [0, 200, 380, 580, 760, 1000]
    trace = {"compute": [[begin, begin + 180] for begin in begins_ms], "waits": []}
    # 200, 180, 200 and 180: what follows the last all-gather does not count.
    gaps_s = truth_figures._gaps_s([trace], KNOWN)
    assert gaps_s == pytest.approx([0.02, 0, 0.02, 0])
    assert truth_figures._compute_jitter([trace], KNOWN) == pytest.approx(10 / 190)
    data = profile(KNOWN).model_dump()
    data["compute_s"] = {"default": 0.19, "jitter": 10 / 190}
    moved = truth_figures.moved(Profile.model_validate(data), KNOWN, Setting(60, 400))
    assert moved.compute_s.jitter * moved.compute_s.default == pytest.approx(0.01)


def test_what_ranks_wait_for_the_last_one_in_fsdp2s_all_gathers_is_no_cost() -> None:
    alike = saw(KNOWN, CALIBRATION)
    # Each rank and round by itself.
    apart = json.loads(json.dumps(alike))
    for of_rank in apart["seen"]["blocking"][:3]:
        for trace in of_rank["traces"]:
            trace["end"] -= 1
            trace["gathers"] = {op: [begin, end + 20] for op, (begin, end) in trace["gathers"].items()}
    assert apart != alike
    assert truth_figures.calibrated(apart, MODULE, KNOWN) == truth_figures.calibrated(alike, MODULE, KNOWN)


def test_what_peers_wait_for_one_another_is_no_cost() -> None:
    """In the group of ranks 0 and 1 rank 0 came early to AR_0; in the other nobody waited for AR_1."""
    of_rank = [{"AR_0": 9.0, "AR_1": 2.0}, {"AR_0": 3.0, "AR_1": 2.5}, {"AR_0": 4.0}, {"AR_0": 5.0, "AR_1": 7.0}]
    traces = [{"ops": {op: (0, 1000, 1000 + 1000 * took_s) for op, took_s in ops.items()}} for ops in of_rank]
    assert truth_figures._slowest_s(traces, "AR", [(0, 1), (2, 3)]) == (4.0 + 2.0) / 2
    # In the groups 3 and 4, and 2 and 0: a mean of 2.25.
    squares = [(took_s - 2.25) ** 2 for took_s in (3.0, 4.0, 2.0, 0.0)]
    assert truth_figures._jitter(traces, "AR", [(0, 1), (2, 3)]) == pytest.approx((sum(squares) / 4) ** 0.5 / 2.25)
    assert truth_figures._slowest_s(traces, "RS", [(0, 1)]) == truth_figures._jitter(traces, "RS", [(0, 1)]) == 0


def test_exposed_time_is_that_of_the_last_rank_the_median_of_the_rounds() -> None:
    """Of another rank in each round."""
    ends, waits = ([3.0, 1.0, 1.0], [1.0, 3.0, 9.0]), ([0.4, 9.0, 9.0], [9.0, 0.2, 0.3])
    seen = [
        {
            "peak_bytes": 8,
            "traces": [{"end": end, "stats": {"commplan/compute_wait_s": wait}} for end, wait in zip(*of_rank, strict=True)],
        }
        for of_rank in zip(ends, waits, strict=True)
    ]
    measured = {"times_s": {"blocking": [[3.0, 1.0, 1.0], [1.0, 3.0, 9.0]]}, "seen": {"blocking": seen}}
    (row,) = truth_figures.compared(measured, profile(KNOWN), TABLE, KNOWN, ())
    assert (row.measured_s, row.measured_exposed_s) == (3.0, 0.3)


def row(schedule: str, measured_s: float, predicted_s: float, **changes: Any) -> Row:
    given = {"setting": "one", "is_calibration": False, "measured_exposed_s": 0.0, "predicted_exposed_s": 0.0}
    return Row(
        schedule=schedule,
        measured_s=measured_s,
        predicted_s=predicted_s,
        measured_peak_bytes=8,
        predicted_peak_bytes=8,
        **(given | changes),
    )


def test_ranks_are_compared_within_a_setting_where_times_differ() -> None:
    right = [row("a", 1.0, 1.1), row("b", 2.0, 1.9), row("c", 3.0, 2.0)]
    assert truth_figures.kendall_tau(right) == 1
    assert truth_figures.kendall_tau([row("a", 1.0, 3.0), *right[1:]]) == pytest.approx((1 - 2) / 3)
    # Too near to each other to be ranked, and of another setting.
    assert truth_figures.kendall_tau([*right, row("d", 3.05, 2.0)]) == 1
    assert truth_figures.kendall_tau([*right, row("d", 0.1, 9.0, setting="two")]) == 1


def test_what_was_calibrated_with_does_not_count_and_a_wrong_peak_is_told() -> None:
    rows = [row("overlapped_allreduce", 1.0, 9.0, is_calibration=True), row("a", 2.0, 1.9), row("b", 2.0, 2.2)]
    elsewhere = [row("a", 2.0, 1.0), row("b", 2.0, 2.0)]
    figures = truth_figures.figures(rows, elsewhere)
    assert figures["mean_error"] == pytest.approx(0.075)
    assert figures["max_error"] == pytest.approx(0.1)
    assert (figures["elsewhere"]["mean_error"], figures["elsewhere"]["max_error"]) == (0.25, 0.5)
    assert truth_figures.problems(figures) == []
    wrong = truth_figures.figures([*rows, Row("one", "c", False, 1, 1, 0, 0, 8, 9)], elsewhere)
    assert truth_figures.problems(wrong) == ["the peak of 1 schedule(s) was predicted wrong"]


def test_at_least_six_schedules_are_predicted_in_at_least_four_settings() -> None:
    assert len(set(truth.SCHEDULES) - set(CALIBRATION)) >= 6
    assert len(truth.COMPUTE_MS) * len(truth.RATES_MBIT) >= 4
    assert set(truth.SCHEDULES) <= set(library.names())
