"""tools/fuzz and tools/bench: what they report. Nothing here is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commplan import compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from bench_run import __main__ as bench
from bench_run import compiling
from fuzz_run import __main__ as fuzz
from fuzz_run import inputs


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "EXAMPLES", 3)


@pytest.mark.usefixtures("few")
def test_a_moment_of_fuzzing_finds_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MAX_S", 60.0)
    assert fuzz.main(["--minutes", "0", "--seed", "7"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("seed 7\n")
    assert "0 failures" in shown
    assert all(f"\n{target}" in shown for target in fuzz.TARGETS)


@pytest.mark.usefixtures("few")
def test_a_traceback_is_reported_with_its_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, *_: object) -> tuple[()]:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(compiler, "check", fails)
    assert fuzz.main(["--minutes", "0", "--seed", "7"]) == 1
    shown = capsys.readouterr().out
    assert "4 failures" in shown
    assert "texts, ZeroDivisionError at test_fuzz_and_bench.py" in shown


@pytest.mark.usefixtures("few")
def test_slow_files_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MAX_S", -1.0)
    assert fuzz.main(["--minutes", "0", "--seed", "7"]) == 1
    assert "schedules: 0." in capsys.readouterr().out.split("failures, ")[1]


def test_what_fuzzing_begins_with_is_what_the_library_holds() -> None:
    for text, known in zip(inputs.TEXTS, inputs.KNOWN, strict=True):
        assert compiler.compile(known + "\n", 3) == compiler.compile(text, 3)


def test_figures_of_the_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    times = compiling.ProcessTimes("least", 128, 1, 0.25, (0.25, 0.25), 1.0, (1.0, 1.0), 0.25)
    monkeypatch.setattr(compiling, "process_times", lambda schedule, runs: times)
    out = tmp_path / "new" / "figures.json"
    assert bench.main(["compile", "--runs", "1", "--modules", "4,2", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert figures["process"]["ratio"] == 0.25
    by_count = figures["growth"]["check_and_compile_s"]
    assert list(by_count) == ["2", "4"]
    assert figures["growth"]["last_factor"] == pytest.approx(by_count["4"] / by_count["2"])
    assert 2 ** figures["growth"]["exponents"][0] == pytest.approx(by_count["4"] / by_count["2"])
    assert "ratio" in capsys.readouterr().out


def test_figures_of_rank_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert bench.main(["rank_checks", "--runs", "2", "--modules", "2", "--compute", "0,1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["compute_ms"] for row in rows] == [0, 1]
    for row in rows:
        assert set(row["backward_s"]) == {"off", "backward", "always"}
        for mode, taken_s in row["backward_s"].items():
            assert taken_s > row["num_modules"] * row["compute_ms"] / 1e3
            assert row["ratio_off"][mode] == pytest.approx(taken_s / row["backward_s"]["off"])
    shown = capsys.readouterr().out
    assert f"{rows[0]['backward_s']['always'] * 1e3:.1f} ms" in shown
