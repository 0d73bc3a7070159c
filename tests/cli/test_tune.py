"""`commplan tune`: a file that checks, the table, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from commplan.tune import Search
from tests.cli.running import Run, write
from tests.cli.test_simulate import PROFILE


def test_it_writes_a_schedule_that_checks_and_is_as_fast_as_told(run: Run) -> None:
    profile = str(write("p.yaml", PROFILE.replace("compute_s", "fsdp2_gathers: blocking\ncompute_s")))
    result = run("tune", "mine", "--profile", profile, "--modules", "6", "--memory-cap", "13MiB")
    assert result.code == 0
    assert "tried" in result.err
    row = next(line.split() for line in result.out.splitlines() if line.startswith("mine "))
    assert "wrote mine.yaml" in result.out
    assert run("check", "mine.yaml").code == 0
    told = run("simulate", "mine.yaml", "prefetch_overlap", "--profile", profile, "--modules", "6").out
    assert f"mine {row[1]}" in " ".join(told.split())
    assert "Found by `commplan tune` for 6 modules" in Path("mine.yaml").read_text()


def test_no_file_is_overwritten_and_a_cap_that_nothing_keeps_writes_none(run: Run) -> None:
    profile = str(write("p.yaml", PROFILE))
    Path("mine.yaml").write_text("mine")
    taken = run("tune", "mine", "--profile", profile, "--modules", "4")
    assert (taken.code, Path("mine.yaml").read_text()) == (2, "mine")
    assert "exists already" in taken.text
    tight = run("tune", "tight", "--profile", profile, "--modules", "4", "--memory-cap", "1KB")
    assert tight.code == 1
    assert "no schedule keeps a cap of 1000 bytes" in tight.text
    assert not Path("tight.yaml").exists()
    assert run("tune", "blocking", "--profile", profile, "--modules", "4").code == 2


def test_a_cap_is_named_only_where_what_it_finds_is_nearly_as_fast(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = str(write("p.yaml", PROFILE))
    named = run("tune", "first", "--profile", profile, "--modules", "6").out
    assert "with --memory-cap " in named
    cap = named.split("--memory-cap ")[1].split(":")[0]
    capped = run("tune", "second", "--profile", profile, "--modules", "6", "--memory-cap", cap)
    assert named.split(f"--memory-cap {cap}: ")[1].split(",")[0] in capped.out
    # As if what takes least, whatever its time, were as fast.
    leanest = lambda search, best: min(search.library_ranking(), key=lambda found: found.peak_bytes)  # noqa: E731
    monkeypatch.setattr(Search, "leanest_beside", leanest)
    assert "--memory-cap" not in run("tune", "third", "--profile", profile, "--modules", "6").out


def test_a_cap_under_which_a_search_comes_to_nothing_is_not_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "leanest_beside", lambda search, best: SimpleNamespace(peak_bytes=1000))
    result = run("tune", "mine", "--profile", str(write("p.yaml", PROFILE)), "--modules", "6")
    assert result.code == 0
    assert "--memory-cap" not in result.text
    assert "wrote mine.yaml" in result.out
