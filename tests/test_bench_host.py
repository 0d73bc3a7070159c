"""tools/bench host and scale: what they report, and the fake ranks that they train with. Nothing here is timed."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

import commplan
from commplan.errors import RankMismatchError
from commplan.language import library

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from bench_run import __main__ as bench
from bench_run import fake_ranks, host, host_work, scale

SETTING = host.Setting("overlapped_allreduce", 200, (50, 800), 3)


def test_figures_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    assert bench.main(["host", "--modules", "3", "--growth", "2", "--runs", "2", "--json", str(out)]) == 0
    assert not dist.is_initialized()
    figures = json.loads(out.read_text())
    assert (figures["modules"], figures["parameters"], figures["schedule"]) == (3, 9, "overlapped_allreduce")
    had = ["plain", "native", "commplan", "commplan_streams"]
    if host.PREFETCH_SCHEDULE in library.names():
        assert figures["left_out"] == {}
        had += ["commplan_prefetch", "commplan_prefetch_streams"]
    assert all(figures[f"{name}_us"] > 0 for name in had)
    assert list(figures["us_by_modules"]) == ["2", "3"]
    assert 0 < figures["thread_us"]["plain"] < figures["thread_us"]["native"]
    if sys.platform == "linux":
        assert all(figures["one_core_us"][name] > 0 for name in had)
    shown = capsys.readouterr().out
    assert "overlapped_allreduce, streams" in shown
    assert f"{figures['native_us']:.0f}" in shown


def times(us: float, count: int) -> host.Times:
    """Three backwards of which the middle one takes so many microseconds a module; the thread is busy for half of it."""
    taken_s = us * count / 1e6
    return host.Times([taken_s * 7, taken_s, 0.0], [taken_s / 2] * 3)


def test_ratios_and_growth_are_of_medians() -> None:
    us = {"plain": 100.0, "native": 500.0, "commplan": 450.0, "commplan_prefetch": 400.0}
    measured = {(count, name): times(of_module, count) for count in SETTING.counts for name, of_module in us.items()}
    measured[800, "plain"] = times(1600.0, 800)
    alone = {"native": times(500.0, 200), "commplan": times(300.0, 200)}
    figures = host.figures(SETTING, measured, alone, {"x": "not in the library"})
    assert {name: figures[f"{name}_us"] for name in us} == pytest.approx(us)
    assert figures["ratio_native"] == pytest.approx(0.8)
    assert figures["ratios"]["commplan"] == pytest.approx(0.9)
    assert figures["one_core_ratios"]["commplan"] == pytest.approx(0.6)
    assert figures["one_core_ratios"]["plain"] is None
    assert figures["thread_us"]["native"] == pytest.approx(250)
    assert figures["exponents"]["native"] == pytest.approx(1)
    assert figures["exponents"]["plain"] == pytest.approx(2)
    assert figures["commplan_streams_us"] is None
    shown = "\n".join(host.shown(figures))
    assert "N^2.00" in shown
    assert "left out: x: not in the library" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="threads can be kept to a core on Linux only")
def test_on_one_core_every_thread_is_kept_there_and_none_afterwards() -> None:
    before, ends = os.sched_getaffinity(0), threading.Event()
    if len(before) < 2:
        pytest.skip("there is one core alone")
    threads = [threading.Thread(target=ends.wait, daemon=True) for _ in range(2)]
    threads[0].start()
    with host_work.one_core():
        threads[1].start()
        inside = [os.sched_getaffinity(thread.native_id or 0) for thread in (threading.main_thread(), *threads)]
    after = [os.sched_getaffinity(thread.native_id or 0) for thread in (threading.main_thread(), *threads)]
    ends.set()
    assert inside == [{min(before)}] * 3
    assert after == [before] * 3


def test_without_prefetch_the_ratio_is_of_what_there_is() -> None:
    measured = {(count, name): times(500.0, count) for count in SETTING.counts for name in ("plain", "native", "commplan")}
    assert host.figures(SETTING, measured, {}, {})["ratio_native"] == pytest.approx(1)


def test_where_nothing_could_be_attached_the_reason_is_shown() -> None:
    measured = {(count, name): times(500.0, count) for count in SETTING.counts for name in ("plain", "native")}
    figures = host.figures(SETTING, measured, {}, {"overlapped_allreduce": "commplan does not know torch 9.9"})
    assert figures["ratio_native"] is None
    assert "left out: overlapped_allreduce: commplan does not know torch 9.9" in host.shown(figures)


def test_absent_ranks_take_part_in_whatever_ranks_agree_on() -> None:
    options = commplan.Options(timeout_s=5.0)
    with fake_ranks.fake_world(6) as store:
        model = fake_ranks.make_model(2, fake_ranks.mesh_of(3, 2))
        for _ in range(2):
            with commplan.attach(model, "overlapped_allreduce", options=options, rank_checks="always") as attachment:
                fake_ranks.loss_of(model).backward()
                assert attachment.last_backward is not None
        assert store.requests.notes_read == 2 * 2 * 6
        # A rank that is there and differs is found all the same.
        echo = store.get

        def differs(key: str) -> bytes:
            return b"{}" if key.endswith("/4") else echo(key)

        store.get = differs  # type: ignore[method-assign]
        with pytest.raises(RankMismatchError, match=r"rank\(s\) 4"):
            commplan.attach(model, "overlapped_allreduce", options=options)


def test_figures_of_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "in_own_process", scale.measure_point)
    out = tmp_path / "figures.json"
    assert bench.main(["scale", "--modules", "2,4", "--ranks", "4,16", "--runs", "1", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert [(p["modules"], p["ranks"], p["mesh"]) for p in figures["points"]] == [
        (2, 4, [2, 2]),
        (4, 4, [2, 2]),
        (2, 16, [2, 8]),
        (4, 16, [2, 8]),
    ]
    for point in figures["points"]:
        assert all(point[name] > 0 for name in scale.FIGURES if name != "rss_bytes")
        assert point["plan_bytes"] < point["attachment_bytes"]
        # It reads what all have, and that all are ready.
        assert point["num_requests_last"] == point["num_requests"] + 2 * point["ranks"]
    few, many = figures["points"][0], figures["points"][1]
    assert 2 ** figures["exponents_of_modules"]["plan_bytes"] == pytest.approx(many["plan_bytes"] / few["plan_bytes"])
    assert "a fake process group" in capsys.readouterr().out


def test_a_point_comes_from_a_process_of_its_own() -> None:
    assert scale.in_own_process("overlapped_allreduce", 2, 4, 1)["ranks"] == 4
    assert not dist.is_initialized()


@pytest.mark.parametrize(("ranks", "shape"), [(4, (2, 2)), (6, (2, 3)), (16, (2, 8)), (4096, (512, 8))])
def test_a_replica_is_a_host(ranks: int, shape: tuple[int, int]) -> None:
    assert scale.mesh_shape(ranks) == shape


@pytest.mark.parametrize("ranks", ["4", "2,4", "4,20"])
def test_ranks_that_make_no_mesh_are_refused(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["scale", "--ranks", ranks])
    assert "--ranks" in capsys.readouterr().err
