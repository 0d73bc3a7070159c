"""`commplan report`: one page from schedules, runs or both."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from commplan import picture
from tests.cli.running import BAD, FINDING, Run, write
from tests.picture.given import PROFILE, run_like, simulated


def embedded(path: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', Path(path).read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads(text)
    return found


def saved(name: str, schedule: str, num_modules: int = 6, rank: int = 0) -> str:
    return write(name, run_like(simulated(schedule, num_modules), rank).to_json())


def measured(path: str) -> list[tuple[int, int]]:
    """Of each panel: its section, and whether it was measured."""
    return [(panel["section"], panel["measured"]) for panel in embedded(path)["panels"]]


def test_schedules_under_a_profile(run: Run) -> None:
    given = ("blocking", "pipelined_allreduce", "--profile", write("p.yaml", PROFILE), "--modules", "4")
    result = run("report", *given, "--memory-cap", "8MiB")
    assert (result.code, result.out) == (0, "")
    assert re.search(r"report\.html: 2 predicted, 0\.\d\d MB", result.err)
    assert measured("report.html") == [(0, 0), (1, 0)]
    assert embedded("report.html")["cap"] == 8 << 20
    again = run("report", *given, "--memory-cap", "8MiB", "-o", "again.html")
    assert again.code == 0
    assert Path("again.html").read_bytes() == Path("report.html").read_bytes()


def test_params_apply_to_the_schedules_that_have_them(run: Run) -> None:
    given = ("windowed_allreduce", "blocking", "--profile", write("p.yaml", PROFILE), "--modules", "6")
    assert run("report", *given, "--set", "k=1").code == 0
    assert "k=1" in Path("report.html").read_text(encoding="utf-8")
    unknown = run("report", *given, "--set", "depth=1")
    assert (unknown.code, "no schedule here has a param 'depth'" in unknown.text) == (2, True)


def test_runs_alone_and_in_either_way(run: Run) -> None:
    first, second = saved("a.json", "blocking"), saved("b.json", "pipelined_allreduce", rank=1)
    one, other = run("report", first, second), run("report", first, "--run", second, "-o", "other.html")
    assert (one.code, other.code) == (0, 0)
    assert "2 measured" in one.err
    assert measured("report.html") == measured("other.html") == [(0, 1), (1, 1)]


def test_with_a_profile_the_plan_of_a_run_is_predicted_too(run: Run) -> None:
    path, profile = saved("a.json", "blocking"), write("p.yaml", PROFILE)
    assert run("report", path, "--profile", profile).code == 0
    assert measured("report.html") == [(0, 0), (0, 1)]
    # The modules of schedules are then those of the run.
    assert run("report", "pipelined_allreduce", path, "--profile", profile).code == 0
    assert measured("report.html") == [(0, 0), (1, 0), (1, 1)]
    assert run("report", "blocking", "--run", path, "--profile", profile, "--modules", "6").code == 0
    assert measured("report.html") == [(0, 0), (0, 1)]


def test_what_is_wrong(run: Run) -> None:
    profile = write("p.yaml", PROFILE)
    path, other = saved("a.json", "blocking"), saved("b.json", "blocking", 7)
    for told, arguments in {
        "name schedules, or runs": (),
        "needs --profile": ("blocking", path),
        "they are for schedules": (path, "--profile", profile, "--modules", "6"),
        "say for how many modules": ("blocking", "--profile", profile),
        "runs are of different models": ("blocking", path, other, "--profile", profile),
        "cannot read": ("missing.json",),
        "not a saved run": (write("c.json", '{"format": "commplan.plan"}'),),
        "not a whole run": (write("d.json", '{"format": "commplan.run", "version": 1}'),),
        "expected a size above 0": (path, "--memory-cap", "much"),
        "cannot write missing/out.html": (path, "-o", "missing/out.html"),
    }.items():
        result = run("report", *arguments)
        assert (result.code, told in " ".join(result.text.replace("│", " ").split())) == (2, True), (told, result.text)
    bad = run("report", write("bad.yaml", BAD), "--profile", profile, "--modules", "4")
    assert bad.code == 1
    assert FINDING.search(bad.text)
    assert not Path("report.html").exists()


def test_what_is_too_large_is_not_written(run: Run, monkeypatch: Any) -> None:
    path = saved("a.json", "blocking")
    monkeypatch.setattr(picture, "page", partial(picture.page, max_bytes=10_000))
    result = run("report", path)
    assert (result.code, "give fewer schedules or modules" in result.err) == (1, True)
    assert not Path("report.html").exists()
