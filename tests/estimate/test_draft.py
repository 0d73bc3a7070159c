"""Analytic profiles: they load and simulate, say where every figure is from, and refuse what nobody knows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import commplan
from commplan.errors import CommplanError
from commplan.estimate import NODES, Job, estimate, find_model, find_node, preset_names
from commplan.estimate.formulas import Work
from commplan.language.presets import NodePreset
from commplan.language.profiles import parse_profile
from commplan.ops import Axis, Kind
from commplan.simulate import compute_alone, costs, simulate

GIVEN_FOR_NPU = {"mfu": 0.4, "base_latency_s": 1e-5, "intra_latency_s": 1e-6, "inter_latency_s": 1e-5}


def job(model: str = "llama3-8b", node: str = "dgx-h100", shard: int = 8, replicate: int = 4, **changes: Any) -> Job:
    work = Work(changes.pop("sequence", 8192), changes.pop("micro_batch", 1), changes.pop("recomputes", False))
    return Job(find_model(model), find_node(node), shard, replicate, work, **changes)


@pytest.mark.parametrize("node", preset_names(NODES))
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_every_preset_gives_a_profile_that_simulates(model: str, node: str) -> None:
    given = GIVEN_FOR_NPU if node.startswith("ascend") else {}
    found = estimate(job(model, node, given=given))
    read = parse_profile(found.text)
    assert read.axes.keys() == found.profile.axes.keys()
    for name in ("blocking", "prefetch_overlap"):
        plan = commplan.compile(name, found.table)
        assert simulate(plan, costs(plan, read)).duration_s >= sum(compute_alone(plan, read)) > 0


@pytest.mark.parametrize("node", preset_names(NODES))
def test_every_figure_that_counts_is_told_with_its_source(node: str) -> None:
    given = GIVEN_FOR_NPU if node.startswith("ascend") else {}
    found = estimate(job(node=node, given=given))
    preset = find_node(node)
    for name, figure in preset.figures():
        assert f"{name}: " in found.profile.source
        assert f"from {preset.sources[figure.source]}" in found.profile.source
    assert ("as given by the caller" in found.profile.source) is bool(given)
    comments = "\n".join(line for line in found.text.splitlines() if line.lstrip().startswith("#"))
    for key in ("kaplan", "palm", "nccl", "ring"):
        assert f"\n[{key}] " in found.profile.source
        assert key in comments


def test_a_layer_of_the_8b_on_an_h100_by_hand() -> None:
    """4 * 8192 * (218.1 M + 2 * 8192 * 4096) FLOPs at 40% of 989.5 TFLOP/s."""
    found = estimate(job())
    matrices = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert found.profile.compute_s.default == pytest.approx(4 * 8192 * (matrices + 2 * 8192 * 4096) / (0.4 * 989.5e12))
    assert found.profile.compute_s.modules["norm"] == pytest.approx(4 * 8192 * 4096 * 128256 / (0.4 * 989.5e12))
    again = estimate(job(recomputes=True))
    assert again.profile.compute_s.default == pytest.approx(1.5 * (found.profile.compute_s.default or 0))
    assert again.profile.compute_s.modules["norm"] == found.profile.compute_s.modules["norm"]


def seconds(of: Job, axis: Axis, kind: Kind, size_bytes: int) -> float:
    return sum(estimate(of).profile.transfer(axis, kind).seconds(size_bytes))


def test_collectives_by_hand() -> None:
    """A gigabyte: 7/8 of it over NVLink in 7 steps; 2 * 3/4 of it over one port in 6 steps between nodes."""
    size = 10**9
    found = seconds(job(), Axis.SHARD, Kind.REDUCE_SCATTER, size)
    assert found == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7 / 8 * size / 370.8e9)
    found = seconds(job(), Axis.REPLICATE, Kind.ALL_REDUCE, size)
    assert found == pytest.approx(8.4e-6 + 6 * 14e-6 + 1.5 * size / 48.5e9)
    # Four shards: two members of a replicate group share a node, and so do their ports.
    found = seconds(job(shard=4, replicate=8), Axis.REPLICATE, Kind.ALL_REDUCE, size)
    assert found == pytest.approx(8.4e-6 + 8 * 3.4e-6 + 6 * 14e-6 + 14 / 8 * size / (2 * 48.5e9))
    # Two nodes share one copy: eight ports, but no more than NVLink takes.
    found = seconds(job(shard=16, replicate=2), Axis.SHARD, Kind.ALL_GATHER, size)
    assert found == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1 * 14e-6 + 15 / 16 * size / 370.8e9)
    # Wired in pairs: all seven others at once.
    npu = job(node="ascend-910b", given=GIVEN_FOR_NPU)
    assert seconds(npu, Axis.SHARD, Kind.ALL_GATHER, size) == pytest.approx(1e-5 + 1e-6 + 7 / 8 * size / (7 * 28e9))


def test_axes_that_share_a_network_share_its_link() -> None:
    found = estimate(job(shard=16, replicate=2)).profile
    assert {costs.link for costs in found.axes.values()} == {"network"}
    assert {costs.link for costs in estimate(job(shard=4, replicate=2)).profile.axes.values()} == {"node"}


@given(st.integers(1, 1 << 17), st.integers(1, 1 << 17), st.integers(1, 8))
def test_more_tokens_take_longer(one: int, other: int, rows: int) -> None:
    low, high = (estimate(job(sequence=n, micro_batch=rows)).profile.compute_s for n in sorted((one, other)))
    assert (low.default or 0) <= (high.default or 0)
    assert low.modules["norm"] <= high.modules["norm"]


@given(st.floats(1e6, 1e13), st.floats(1e6, 1e13), st.integers(1, 1 << 34))
def test_a_faster_network_takes_no_longer(one: float, other: float, size_bytes: int) -> None:
    for figure, axis, kind in (
        ("intra_bytes_per_s", Axis.SHARD, Kind.REDUCE_SCATTER),
        ("inter_bytes_per_s", Axis.REPLICATE, Kind.ALL_REDUCE),
    ):
        slow, fast = (seconds(job(given={figure: speed}), axis, kind, size_bytes) for speed in sorted((one, other)))
        assert fast <= slow


def test_the_table_is_that_of_the_model() -> None:
    table = estimate(job()).table
    assert [module.name for module in table.modules][:2] == ["norm", "layers.31"]
    assert table.modules[-1].name == "tok_embeddings"
    assert sum(p.numel for module in table.modules for p in module.parameters) == 8_030_261_248
    assert {(m.gather_dtype, m.reduce_dtype, m.shard_size) for m in table.modules} == {("bfloat16", "float32", 8)}
    assert [m.resharded_after_forward for m in table.modules] == [False] + [True] * 33
    assert not any(m.resharded_after_forward for m in estimate(job(reshards=False)).table.modules)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"node": "ascend-910b"}, "no mfu, for which no source was found: give --mfu"),
        ({"node": "ascend-910b", "given": {"mfu": 0.4}}, "no base_latency_s, .* give --base-latency-s"),
        ({"shard": 3}, "shard groups of 3 do not fit nodes of 8 devices: take a divisor of 8 or a multiple"),
        ({"shard": 2, "replicate": 6}, "6 replicas of 2 devices do not fill nodes of 8 devices: take a multiple of 4"),
    ],
)
def test_what_nobody_knows_is_asked_for(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CommplanError, match=told):
        estimate(job(**changes))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"peak_flops": 1.0}, r"compute_s.default: .*: check --peak-flops, --sequence, --micro-batch"),
        ({"mfu": 1e-30}, r"compute_s.default: .*: check --mfu, --sequence"),
        ({"intra_bytes_per_s": 1e30}, r"axes.shard.all_gather.bytes_per_s: .*: check --intra-bytes-per-s$"),
        ({"inter_bytes_per_s": 1e30, "intra_bytes_per_s": 1e30}, r"all_reduce.bytes_per_s: .* check --intra-.*, --inter-"),
        ({"hbm_bytes_per_s": 1e30}, r"host.pack_bytes_per_s: .*: check --hbm-bytes-per-s"),
        ({"base_latency_s": 1e30}, r"axes.shard.all_gather.latency_s: .*: check --base-latency-s"),
    ],
)
def test_figures_of_which_nothing_sensible_comes_are_told_by_their_options(given: dict[str, float], told: str) -> None:
    with pytest.raises(CommplanError, match=re.compile(told, re.MULTILINE)):
        estimate(job(given=given))


def test_a_speed_that_is_given_is_a_switchs_and_so_is_its_latency() -> None:
    """All-reduce among eight: a ring of 14 steps, as on a node that has a switch; 2 where all are wired to all."""
    latencies = {"base_latency_s": 1e-3, "intra_latency_s": 1e-4, "mfu": 0.4, "inter_latency_s": 1e-5}
    for node, figures, num in (
        ("ascend-910b", {}, 2),
        ("ascend-910b", {"intra_bytes_per_s": 1e11}, 14),
        ("dgx-h100", {"intra_bytes_per_s": 1e11}, 14),
    ):
        of = job(node=node, shard=1, replicate=8, given={**latencies, **figures})
        assert seconds(of, Axis.REPLICATE, Kind.ALL_REDUCE, 0) == pytest.approx(1e-3 + num * 1e-4)


NODE = (NODES / "dgx-h100.yaml").read_text(encoding="utf-8")
BAD = [
    (
        NODE.replace("devices: {value: 8, source: dgx}", "devices: {value: 8, source: dxg}"),
        "devices is from 'dxg'.*did you mean dgx",
    ),
    (
        NODE.replace("devices: {value: 8,", "devices: {value: 0,"),
        r"n.yaml:\d+:\d+: devices.value: .*greater than or equal to 1",
    ),
    (NODE + "colour: {value: 1, source: dgx}\n", r"n.yaml:\d+:\d+: colour: Extra inputs"),
    (NODE.replace("mfu: {value: 0.4", "mfu: {value: 1.4"), r"n.yaml:\d+:\d+: mfu.value: "),
    (NODE + "intra_pair_bytes_per_s: {value: 1, source: dgx}\n", "not both"),
    (NODE.replace("sources:", "sources:\n  more: nothing"), "no figure is from the source 'more'"),
    ("[]", "n.yaml:1:1: a preset is a mapping"),
    (NODE.replace("name: DGX H100", "name: " + "long " * 17), r"n.yaml:\d+:\d+: name: "),
    (NODE.replace("name: DGX H100", 'name: "two\\nlines"'), r"n.yaml:\d+:\d+: name: "),
]


@pytest.mark.parametrize(("text", "told"), BAD)
def test_what_is_wrong_with_a_preset_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "n.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CommplanError, match=told):
        find_node(str(path))


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(NODE.replace("name: DGX H100", "name: mine"), encoding="utf-8")
    mine = find_node(str(path))
    assert isinstance(mine, NodePreset)
    assert mine.name == "mine"
    with pytest.raises(CommplanError, match="there is no preset 'dgx-h10': did you mean dgx-h100"):
        find_node("dgx-h10")
    with pytest.raises(CommplanError, match="cannot read"):
        find_model("nowhere.yaml")
