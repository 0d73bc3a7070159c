"""`tools/bench tuner`: its rows, and what it calls wrong. Nothing is timed, and no hosts are made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from bench_run import tuner


def figures(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    found = {
        "max_ratio_brute_force": max(row["ratio_brute_force"] for row in rows),
        "max_ratio_library": max(row["ratio_library"] for row in rows),
        "num_caps_broken": 0,
        "many_modules": 128,
        "many_modules_s": 9.0,
        "two_hosts": "not root",
        "rows": rows,
    }
    return found | changes


def test_a_row_compares_what_was_found_with_every_one() -> None:
    row = tuner._row(2, tuner.profile(0.3, 1.0))
    assert row["tuned_s"] <= row["brute_force_s"] * 1.02
    assert row["tuned_s"] <= row["library_s"]
    assert row["tried_by_brute_force"] > row["tried"]
    assert row["peak_under_cap_bytes"] <= row["cap_bytes"]
    assert row["under_cap_s"] >= row["tuned_s"]
    lines = tuner.shown(figures([row]))
    assert "1 : 0.3 : 1" in lines[1]
    assert lines[-1] == "two hosts: not measured: not root"
    assert tuner.problems(figures([row])) == []


def test_what_is_wrong_is_told() -> None:
    rows = [{"ratio_brute_force": 1.0, "ratio_library": 1.01}]
    assert tuner.problems(figures(rows, num_caps_broken=2)) == [
        "2 cap(s) on memory were not kept",
        "the library has a faster schedule than what was found",
    ]
