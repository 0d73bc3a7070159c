"""Profiles as YAML: what is wrong is told with its place, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan.errors import CommplanError
from commplan.language.profiles import load_profile, parse_profile

GOOD = """\
version: 1
name: two hosts
source: measured on two hosts
compute_s: {default: 0.18, modules: {layers.0: 0.2}}
axes:
  shard: {link: loopback, reduce_scatter: {bytes_per_s: 1.0e+9}}
  replicate:
    link: network
    all_reduce: {points: [[0, 0.001], [4194304, 0.18]]}
links:
  network: {demand: 0.5, slowdown: 0.1}
"""


def test_a_profile_is_read() -> None:
    found = parse_profile(GOOD)
    assert found.compute_s.modules == {"layers.0": 0.2}
    assert found.axes["replicate"].all_reduce is not None  # type: ignore[index]
    assert found.links["network"].demand == 0.5
    assert found.fsdp2_gathers == "prefetched"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("default: 0.18", "default: -1", "p.yaml:4:22: compute_s.default: "),
        ("bytes_per_s: 1.0e+9", "bytes_per_s: 0", "p.yaml:6:57: axes.shard.reduce_scatter.bytes_per_s: "),
        ("bytes_per_s: 1.0e+9", "latency_s: 1", "p.yaml:6:43: axes.shard.reduce_scatter: .*bytes_per_s"),
        ("bytes_per_s: 1.0e+9", "bytes_per_s: .inf", "p.yaml:6:57: "),
        ("[4194304, 0.18]", "[4194304, 0.0001]", "p.yaml:9:17: axes.replicate.all_reduce: .*ascend"),
        ("demand: 0.5", "demand: 2", "p.yaml:11:21: links.network.demand: "),
        ("source:", "sauce:", "p.yaml:3:8: sauce: "),
        ("version: 1", "version: 2", "p.yaml:1:10: version: "),
        ("{demand: 0.5, slowdown: 0.1}", "{demand: 0.5", "p.yaml:12:1: not YAML: "),
        (
            "network: {demand",
            "netwrk: {demand",
            "p.yaml:1:1: the file: no axis uses the link 'netwrk': .*network",
        ),
        ("link: loopback", "link: ''", "p.yaml:6:17: axes.shard.link: "),
        ("bytes_per_s: 1.0e+9", "bytes_per_s: 1.0e-320", "p.yaml:6:57: "),
        ("[[0, 0.001], [4194304, 0.18]]", "[[4194304, 0.18]]", "p.yaml:9:17: axes.replicate.all_reduce: one point"),
        ("[4194304, 0.18]", "[1" + "0" * 400 + ", 0.18]", "p.yaml:9:"),
        ("two hosts\nsource", '"a\\nb"\nsource', "p.yaml:2:7: name: "),
        ("source: measured on two hosts", "source: !!int ''", "p.yaml: not YAML: "),
        (GOOD, "- 1\n", "p.yaml:1:1: a profile is a mapping"),
        (GOOD, "", "p.yaml:1:1: a profile is a mapping"),
        ("name: two hosts", "name: two hosts\nname: three", "p.yaml:3:1: not YAML: "),
    ],
)
def test_what_is_wrong_is_told_with_its_place(old: str, new: str, told: str) -> None:
    with pytest.raises(CommplanError, match=told):
        parse_profile(GOOD.replace(old, new), "p.yaml")


def test_everything_is_told_at_once() -> None:
    with pytest.raises(CommplanError) as raised:
        parse_profile(GOOD.replace("0.18,", "-1,").replace("demand: 0.5", "demand: 0"), "p.yaml")
    assert len(str(raised.value).splitlines()) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommplanError, match="cannot read"):
        load_profile(tmp_path / "missing.yaml")
