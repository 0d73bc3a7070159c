"""`commplan simulate`: schedules against a profile, in the terminal and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.running import BAD, FINDING, Run, write

PROFILE = """\
version: 1
name: units
compute_s: {default: 10}
axes:
  shard: {link: a, all_gather: {points: [[0, 1]]}, reduce_scatter: {points: [[0, 4]]}}
  replicate: {link: b, all_reduce: {points: [[0, 8]]}}
"""


def test_several_are_compared_the_fastest_first(run: Run) -> None:
    profile = str(write("profile.yaml", PROFILE))
    result = run("simulate", "blocking", "overlapped_allreduce", "pipelined_allreduce", "--profile", profile, "--modules", "4")
    assert result.code == 0
    rows = [line.split() for line in result.out.splitlines() if "ms" in line and "MiB" in line]
    assert [row[0] for row in rows] == ["overlapped_allreduce", "pipelined_allreduce", "blocking"]
    assert [row[1] for row in rows] == ["52000.0", "56000.0", "88000.0"]
    assert [row[3] for row in rows] == ["1.300", "1.400", "2.200"]


JITTER = PROFILE.replace("default: 10}", "default: 10, jitter: 0.1}") + "links: {b: {jitter: 0.2}}\n"


def test_draws_of_what_differs_from_one_time_to_the_next(run: Run) -> None:
    """What waits at every module takes longer than by the means, and some backwards take longer still."""
    given = ("simulate", "eager_apply", "blocking", "--profile", str(write("p.yaml", JITTER)), "--modules", "6")
    once, drawn = run(*given), run(*given, "--draws", "50")
    assert "means of 50 draws" in drawn.out
    assert "nine of ten within" in drawn.out
    assert "draws" not in once.out

    def times(text: str, column: int) -> dict[str, float]:
        return {row[0]: float(row[column]) for row in (line.split() for line in text.splitlines()) if row[-1:] == ["MiB"]}

    assert times(drawn.out, 1)["eager_apply"] > times(once.out, 1)["eager_apply"] * 1.005
    assert times(drawn.out, 1)["blocking"] == pytest.approx(times(once.out, 1)["blocking"], rel=1e-3)
    assert all(times(drawn.out, 3)[name] > times(drawn.out, 1)[name] for name in ("eager_apply", "blocking"))
    data = json.loads(run(*given, "--draws", "50", "--format", "json").out)
    assert [one["draws"]["num"] for one in data] == [50, 50]
    assert f"{data[0]['draws']['backward_s'] * 1e3:.1f}" in drawn.out
    assert f"{data[0]['draws']['nine_of_ten_s'] * 1e3:.1f}" in drawn.out
    assert data[0]["backward_s"] < data[0]["draws"]["backward_s"] < data[0]["draws"]["nine_of_ten_s"]
    alone = run("simulate", "eager_apply", *given[3:], "--draws", "50")
    assert f"with jitter: {data[0]['draws']['backward_s'] * 1e3:.1f} ms in the mean of 50 draws" in alone.out


def test_without_jitter_nothing_is_drawn(run: Run) -> None:
    result = run("simulate", "blocking", "--profile", str(write("p.yaml", PROFILE)), "--modules", "4", "--draws", "30")
    assert result.code == 2
    assert "'units' does not say how much anything differs" in result.text
    assert "compute_s.jitter" in result.text


def test_of_one_the_exposed_collectives_are_told(run: Run) -> None:
    result = run("simulate", "pipelined_allreduce", "--profile", str(write("p.yaml", PROFILE)), "--modules", "4")
    assert result.code == 0
    assert "pipelined_allreduce, predicted: 56000.00 ms" in result.out
    assert "queued behind AR_2 on its lane" in result.out
    assert "rank" not in result.out


def test_json_has_every_op_and_the_curve_of_memory(run: Run) -> None:
    result = run("simulate", "blocking", "--profile", str(write("p.yaml", PROFILE)), "--modules", "2", "--format", "json")
    (data,) = json.loads(result.out)
    ops = {op["op"]: op for op in data["ops"]}
    assert (ops["RS_0"]["begin_s"], ops["RS_0"]["end_s"]) == (10, 14)
    assert (ops["AR_0"]["begin_s"], ops["AR_0"]["end_s"]) == (14, 22)
    assert ops["AR_0"]["began_after"] == "it was issued"
    assert data["backward_s"] == 44
    assert max(point["size_bytes"] for point in data["memory"]) == data["peak_bytes"]
    assert data["memory"][-1]["size_bytes"] == 0
    assert {op["op"] for op in data["exposed"]} == {"RS_0", "AR_0", "RS_1", "AR_1"}


def test_params_apply_to_the_schedules_that_have_them(run: Run) -> None:
    given = ("windowed_allreduce", "blocking", "--profile", str(write("p.yaml", PROFILE)), "--modules", "6")
    one, three = (run("simulate", *given, "--set", f"k={k}", "--format", "json") for k in (1, 3))
    narrow, wide = (json.loads(result.out)[0] for result in (one, three))
    assert narrow["params"] == {"k": 1}
    assert narrow["backward_s"] > wide["backward_s"]
    assert narrow["peak_bytes"] < wide["peak_bytes"]
    unknown = run("simulate", *given, "--set", "depth=1")
    assert unknown.code == 2
    assert "no schedule here has a param 'depth'" in unknown.text


def test_so_few_draws_that_they_tell_nothing_are_refused(run: Run) -> None:
    result = run("simulate", "blocking", "--profile", str(write("p.yaml", JITTER)), "--modules", "4", "--draws", "9")
    assert result.code == 2
    assert "9 draws tell little" in result.text
    assert "ask for 10 or more" in result.text


def test_timelines_are_in_the_order_of_a_table_of_draws(run: Run) -> None:
    names = ("eager_apply", "windowed_allreduce", "overlapped_allreduce", "blocking")
    strong = JITTER.replace("jitter: 0.1", "jitter: 0.5").replace("jitter: 0.2", "jitter: 1.5")
    given = ("compare", *names, "--profile", str(write("p.yaml", strong)), "--modules", "6", "--columns", "77")
    orders = []
    for drawing in ((), ("--draws", "32")):
        out = run(*given, *drawing).out
        assert ("timelines without jitter" in out) == bool(drawing)
        table, timelines = ([line.split()[0].rstrip(":") for line in out.splitlines() if re.search(end, line)] for end in ENDS)
        assert timelines == table
        assert set(table) == set(names)
        orders.append(table)
    # Applies in hooks wait for whatever is late.
    assert orders[0] != orders[1]


ENDS = r"MiB$|[0-9] B$", r": [0-9.]+ ms$"
"""Of lines of the table, and of heads of timelines."""


def test_compare_draws_timelines_beside_the_table(run: Run) -> None:
    given = ("blocking", "overlapped_allreduce", "--profile", str(write("p.yaml", PROFILE)), "--modules", "3")
    table, drawn = run("simulate", *given), run("compare", *given, "--columns", "77")
    assert drawn.code == 0
    assert drawn.out.startswith(table.out)
    lines = drawn.out.splitlines()
    assert lines[lines.index("overlapped_allreduce: 42000.0 ms") + 1] == "compute    000000000011111111112222222222"
    assert lines[lines.index("blocking: 66000.0 ms") + 1].startswith("compute    0000000000            1111111111  ")


def test_a_trace_has_a_process_for_each_schedule(run: Run) -> None:
    given = ("--profile", str(write("p.yaml", PROFILE)), "--modules", "3")
    result = run("trace", "blocking", "prefetch_overlap", *given, "-o", "out.json")
    assert (result.code, result.out) == (0, "")
    assert "out.json: 2 backward(s)" in result.err
    events = json.loads(Path("out.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"blocking", "prefetch_overlap"}
    assert {"AG_0", "RS_1", "AR_2"} <= {e["name"] for e in events if e["ph"] == "X"}
    nowhere = run("trace", "blocking", *given, "-o", "missing/out.json")
    assert nowhere.code == 2
    assert "cannot write missing/out.json" in nowhere.text


def test_what_is_wrong(run: Run) -> None:
    profile = str(write("p.yaml", PROFILE))
    bad = run("simulate", str(write("bad.yaml", BAD)), "--profile", profile, "--modules", "4")
    assert bad.code == 1
    assert FINDING.search(bad.text)
    unread = run("simulate", "missing.yaml", "--profile", profile, "--modules", "4")
    assert (unread.code, "missing.yaml" in unread.text) == (2, True)
    missing = run("simulate", "blocking", "--profile", "missing.yaml", "--modules", "4")
    assert (missing.code, "cannot read" in missing.text) == (2, True)
    wrong = run(
        "simulate", "blocking", "--profile", str(write("w.yaml", PROFILE + "links: {a: {demand: 3}}\n")), "--modules", "4"
    )
    assert wrong.code == 2
    assert "w.yaml:7:21: links.a.demand: " in wrong.text
    silent = PROFILE.replace("all_gather: {points: [[0, 1]]}, ", "")
    asked = run("simulate", "prefetch_overlap", "--profile", str(write("s.yaml", silent)), "--modules", "4")
    assert asked.code == 2
    assert "add axes.shard.all_gather" in asked.text


def test_compute_alone_is_what_the_profile_says_whichever_schedule_comes_first(run: Run) -> None:
    text = PROFILE.replace("compute_s", "fsdp2_gathers: blocking\nlinks: {b: {slowdown: 0.5}}\ncompute_s")
    given = ("--profile", str(write("p.yaml", text)), "--modules", "4")
    one = run("simulate", "blocking", "prefetch_overlap", *given)
    other = run("simulate", "prefetch_overlap", "blocking", *given)
    assert one.out == other.out
    assert "compute alone 40000.0 ms" in one.out
