"""`commplan estimate`: files that `compare` reads, and what is wrong with a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan.estimate.draft import OPTIONS
from commplan.language.profiles import load_profile, parse_profile
from tests.cli.running import Run

MESH = ("--shard", "8", "--replicate", "16")


def test_profile_and_table_work_with_compare_at_once(run: Run) -> None:
    done = run("estimate", "llama3-8b", "--node", "dgx-h100", *MESH, "-o", "p.yaml", "--table", "t.json")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert load_profile("p.yaml").name == "Llama 3 8B, 16 x 8 devices, DGX H100"
    shown = run("compare", "prefetch_overlap", "overlapped_allreduce", "--profile", "p.yaml", "--modules", "t.json")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("34 modules, profile Llama 3 8B")


def test_without_a_file_it_is_printed_and_says_how_it_was_found(run: Run) -> None:
    done = run("estimate", "llama3-70b", "--node", "dgx-a100", *MESH, "--mfu", "0.5", "--recompute")
    assert done.code == 0
    profile = parse_profile(done.out)
    assert "mfu: 0.5\n  as given by the caller" in profile.source
    assert "layers run their forward again" in profile.source
    assert "[megatron]" in profile.source
    assert not list(Path().iterdir())


def test_every_figure_that_is_asked_for_has_its_option(run: Run) -> None:
    told = run("estimate", "--help").out
    assert [option for option in OPTIONS.values() if f"{option} " not in told] == []


def test_a_file_that_is_replaced_is_named(run: Run) -> None:
    Path("p.yaml").write_text("mine")
    done = run("estimate", "llama3-8b", "--node", "dgx-h100", *MESH, "-o", "p.yaml", "--table", "t.json")
    assert (done.code, done.err) == (0, "warning: p.yaml was there already; it is replaced\n")
    assert load_profile("p.yaml").name.startswith("Llama 3 8B")


MISUSES = [
    (("llama3-8", "--node", "dgx-h100", *MESH), "there is no preset 'llama3-8': did you mean llama3-8b?"),
    (("llama3-8b", "--node", "h100", *MESH), "there is no preset 'h100'"),
    (("llama3-8b", "--node", "ascend-910b", *MESH), "give --mfu"),
    (("llama3-8b", "--node", "dgx-h100", "--shard", "3", "--replicate", "8"), "take a divisor of 8"),
    (("llama3-8b", "--node", "dgx-h100", *MESH, "--reduce-dtype", "bfloat"), "did you mean bfloat16?"),
    (("llama3-8b", "--node", "dgx-h100", *MESH, "-o", "nowhere/p.yaml"), "there is no folder"),
    (("llama3-8b", "--node", "dgx-h100", *MESH, "--mfu", "2"), "--mfu"),
    (("llama3-8b", "--node", "dgx-h100", *MESH, "--peak-flops", "1"), "check --peak-flops"),
    (("llama3-8b", "--node", "dgx-h100", *MESH, "--intra-bytes-per-s", "1e30"), "check --intra-bytes-per-s"),
    (("llama3-8b", "--node", "dgx-h100", "--shard", "8", "--replicate", "1" + "0" * 24), "--replicate"),
    (("llama3-8b", "--node", "dgx-h100", *MESH, "-o", "x", "--table", "./x"), "is that of --output"),
]


@pytest.mark.parametrize(("arguments", "told"), MISUSES, ids=[" ".join(arguments) for arguments, _ in MISUSES])
def test_wrong_usage(run: Run, arguments: tuple[str, ...], told: str) -> None:
    done = run("estimate", *arguments)
    assert done.code == 2
    assert told in " ".join(done.err.split())
