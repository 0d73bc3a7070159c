"""`commplan profile`: what it asks for before anything starts, and whole jobs as a launcher starts them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from commplan.cli import calibration, files
from commplan.language import load_table
from commplan.language.profiles import load_profile
from tests.cli.running import Result, Run, write
from tests.cli.test_bench import job

pytest.importorskip("torch")


def test_without_a_launcher_it_says_how_to_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = run("profile", "--", "train.py")
    assert done.code == 2
    assert calibration.HOW_TO_START in done.err


MISUSES = [
    (("--output", "nowhere/profile.yaml"), "there is no folder"),
    (("--output", "."), "'.' can't be written"),
    (("--table", "nowhere/table.json"), "there is no folder"),
    (("--output", "x", "--table", "./x"), "'x' is that of --output"),
    (("--steps", "0"), "--steps"),
    (("--", "trian.py"), "there is no script 'trian.py'; did you mean train.py?"),
    (("--replicas", "3"), "4 ranks can't be 3 equal replicas"),
    (("--modules", "3", "train.py"), "there is a script"),
]


@pytest.mark.parametrize(("arguments", "told"), MISUSES, ids=[" ".join(arguments) for arguments, _ in MISUSES])
def test_wrong_usage(run: Run, launched: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str) -> None:
    write("train.py", "raise AssertionError")
    done = run("profile", *arguments)
    assert done.code == 2
    assert told in " ".join(done.err.split())
    launched.setenv("LOCAL_RANK", "1")
    if arguments[0] != "--steps":  # which is the parser's own
        assert run("profile", *arguments) == Result(2, "", "")


def test_a_job_becomes_a_profile_that_compare_reads(run: Run, tmp_path: Path) -> None:
    options = ("-o", "mine.yaml", "--table", "mine.json", "--steps", "2", "--budget", "1")
    size = ("--modules", "2", "--width", "16", "--batch", "1", "--context", "8", "--replicas", "2")
    ranks = job(4, *options, *size, cwd=tmp_path, command="profile")
    for rank, (code, out, err) in enumerate(ranks):
        assert code == 0, err
        assert "Traceback" not in err
        assert ("mine.yaml: the profile" in out) is (rank == 0)
        assert bool(out) is (rank == 0)
    profile, table = load_profile("mine.yaml"), load_table("mine.json")
    assert f"measured by: commplan profile {' '.join((*options, *size))}" in profile.source
    # As backward runs them: the embedding is the root's.
    assert [module.name for module in table.modules] == ["blocks.1", "blocks.0", "(root)"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "mine.yaml"]
    done = run("compare", "blocking", "prefetch_overlap", "--profile", "mine.yaml", "--modules", "mine.json")
    assert done.code == 0, done.err
    assert "3 modules" in done.out


def test_a_script_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('mine')")
    (tmp_path / "profile.yaml").write_text("as it was")
    ((code, out, err),) = job(1, "--", "train.py", cwd=tmp_path, command="profile")
    assert (code, out) == (1, "")
    assert "ValueError: mine" in err
    assert (tmp_path / "profile.yaml").read_text() == "as it was"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("before")
    files.write_whole(path, "after")
    assert path.read_text() == "after"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask

    def fails(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, "half")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
