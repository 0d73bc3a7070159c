"""Measured backwards as files, and ranks merged into one trace."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import commplan
from commplan import cli
from commplan.errors import CommplanError, ExecutionError
from commplan.picture.content import stops
from commplan.picture.panels import WAIT, measured
from commplan.sight.intervals import Interval
from commplan.sight.measured import processes
from commplan.sight.report import BackwardReport
from commplan.sight.runs import Run
from commplan.sight.trace import IN_FLIGHT, MEMORY, trace
from tests.sight.perfetto import open_trace
from tests.worlds import models
from tests.worlds.world import Rank, Worlds

NUM_BLOCKS = 3


def saved(here: Rank, folder: str) -> tuple[str, int, tuple[int, ...]]:
    """Saves a run; the error before there is one, the peak, and the mesh's coordinates."""
    mesh = here.mesh((2, 2))
    model = models.shard(models.fk(NUM_BLOCKS), mesh)
    with commplan.attach(model, "prefetch_overlap") as attachment:
        with pytest.raises(ExecutionError) as early:
            attachment.save_run("never.json")
        for _ in range(2):
            model(torch.zeros(1, requires_grad=True)).sum().backward()
        attachment.save_run(Path(folder, "run-{rank}.json"))
        assert attachment.last_backward is not None
        return str(early.value), attachment.last_backward.peak_bytes, tuple(mesh.get_coordinate() or ())


def test_ranks_of_a_real_backward_go_into_one_trace(worlds: Worlds, tmp_path: Path) -> None:
    found = worlds.of(4).run(saved, folder=str(tmp_path))
    assert {error for error, _, _ in found} == {"save_run() before the first backward that reduces anything"}
    paths = [tmp_path / f"run-{rank}.json" for rank in range(4)]
    out = tmp_path / "trace.json"
    with pytest.raises(SystemExit) as end:
        cli.main(["trace", *map(str, paths), "-o", str(out)])
    assert end.value.code in (0, None)
    opened = open_trace(json.loads(out.read_text()))
    assert opened.lost == []
    assert {shown.depth for shown in opened.slices} == {0}
    events = json.loads(out.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"rank {r} (replicate {place[0]}, shard {place[1]})" for r, (_, _, place) in enumerate(found)]
    for rank, (_, peak_bytes, _) in enumerate(found):
        own = [event for event in events if event["pid"] == rank + 1]
        slices = [event for event in own if event["ph"] == "X"]
        expected = {f"{kind}_{n}" for kind in ("RS", "AR") for n in range(NUM_BLOCKS)}
        assert expected <= {event["name"] for event in slices}
        assert max(event["args"]["bytes"] for event in own if event["ph"] == "C" and event["name"] == MEMORY) == peak_bytes
        # The wall clock has some 0.2 us in a float.
        assert min(event["ts"] for event in slices) > -1
        assert sum(event["ph"] == "s" for event in own) == NUM_BLOCKS
        by_track = defaultdict(list)
        for event in slices:
            by_track[event["tid"]].append(event)
        for track in by_track.values():
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(track))


def test_what_is_not_the_plans_is_waited_for_by_name() -> None:
    plan = commplan.compile("blocking", 1)
    wait = Interval("FSDP2's all-gather of module 'b.3'", "compute", 2, 3)
    report = BackwardReport(0, 8, [Interval("RS_0", "shard", 1, 4)], [wait], 64, 64, plan=plan)
    for of in (report, replace(report, plan=None)):
        run = Run.from_json(Run(0, {}, 0, of).to_json())
        assert list(run.report.compute_waits) == [wait]
        (process,) = processes([run])
        names = [each.name for each in process.tracks["compute"]]
        assert names == ["compute", "wait: FSDP2's all-gather of module 'b.3'", "compute"]
        assert [bar.name for bar in measured(run).bars if bar.kind == WAIT] == [wait.op]
    (stop,) = stops(measured(run))
    assert (stop.place, stop.what, stop.seconds) == ("FSDP2", "its own all-gathers", 1)


def test_without_its_plan_a_wait_is_told_by_the_number_of_its_step() -> None:
    run = run_of(0, 100.0, 100.0)
    panel = measured(replace(run, report=replace(run.report, plan=None)))
    assert [bar.name for bar in panel.bars if bar.kind == WAIT] == ["step 1", "end of root"]


def run_of(rank: int, begin_s: float, wall_s: float) -> Run:
    plan = commplan.compile("blocking", 1)
    report = BackwardReport(
        begin_s,
        begin_s + 8,
        [
            Interval("RS_0", "shard", begin_s + 1, begin_s + 3, begin_s + 1),
            Interval("AR_0", "replicate", begin_s + 3, begin_s + 7),
        ],
        [Interval("1", "compute", begin_s + 1, begin_s + 3), Interval("", "compute", begin_s + 3, begin_s + 7)],
        64,
        64,
        5,
        plan,
        memory=[(begin_s + 1, 64), (begin_s + 8, 0)],
    )
    return Run(rank, {"replicate": rank}, wall_s, report)


def test_a_file_is_the_whole_run() -> None:
    run = run_of(3, 10.0, 0.5)
    assert Run.from_json(run.to_json()) == run
    without_plan = replace(run, report=replace(run.report, plan=None))
    assert Run.from_json(without_plan.to_json()) == without_plan


def test_ranks_are_laid_beside_each_other_by_their_wall_clocks() -> None:
    # The second rank's clock is 90 s behind the first one's; it began two seconds later.
    events = trace(processes([run_of(1, 12.0, 190.0), run_of(0, 100.0, 100.0)]))["traceEvents"]
    begins = {(e["pid"], e["name"]): e["ts"] / 1e6 for e in events if e["ph"] == "X" and e["name"].endswith("_0")}
    assert begins[1, "RS_0"] == pytest.approx(1)
    assert begins[2, "RS_0"] == pytest.approx(3)
    compute = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 1)]
    assert [(name, pytest.approx(at, abs=1e-8), pytest.approx(dur)) for name, at, dur in compute] == [
        ("compute", 0, 1),
        ("wait: RS_0", 1, 2),
        ("wait: end of root", 3, 4),
        ("compute", 7, 1),
    ]
    moved = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == IN_FLIGHT and e["pid"] == 1]
    # 1024 x 1024 fp32 elements, of which a shard of two is half; then nothing.
    assert moved == [1024**2 * 4, 1024**2 * 2, 0]


BROKEN: dict[str, Any] = {
    "not JSON": "{",
    "not a saved run": '{"format": "commplan.plan"}',
    "version 9": '{"format": "commplan.run", "version": 9}',
    "not a whole run": '{"format": "commplan.run", "version": 1, "rank": 0}',
}


@pytest.mark.parametrize(("told", "text"), BROKEN.items(), ids=BROKEN)
def test_what_is_no_run_is_told(told: str, text: str) -> None:
    with pytest.raises(CommplanError, match=f"r.json: .*{told}"):
        Run.from_json(text, "r.json")


def test_a_wait_at_no_step_of_the_plan_is_told() -> None:
    data = json.loads(run_of(0, 1.0, 0.0).to_json())
    data["compute_waits"][0][0] = "99"
    with pytest.raises(CommplanError, match=r"r.json: not a whole run: compute waits at step 99"):
        Run.from_json(json.dumps(data), "r.json")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("end_s", float("nan"), "nan is no time"),
        ("wall_s", float("inf"), "inf is no time"),
        ("memory", [[float("nan"), 1]], "nan is no time"),
        ("ops", [["RS_0", "shard", 3.0, float("inf"), None]], "inf is no time"),
        ("peak_bytes", float("inf"), "cannot convert"),
    ],
)
def test_times_that_are_none_are_told(key: str, value: Any, told: str) -> None:
    data = json.loads(run_of(0, 1.0, 0.0).to_json()) | {key: value}
    with pytest.raises(CommplanError, match=rf"r.json: not a whole run: {told}"):
        Run.from_json(json.dumps(data), "r.json")


def test_runs_and_schedules_do_not_share_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(run_of(0, 1.0, 0.0).to_json())
    for arguments, told in (
        ([str(path), "blocking"], "can't share a trace"),
        (["blocking"], "needs --profile and --modules"),
        ([str(tmp_path / "missing.json")], "cannot read"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["trace", *arguments])
        assert end.value.code == 2
        assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
