"""Where a finding depends on the sizes of modules and none are given, the check says what it took."""

from pathlib import Path

import pytest

from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis
from tests.cli.running import Run

BY_BYTES = """\
version: 1
name: by_bytes
post_backward:
  - wait: RS_<n-1>
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n, fuse: {bytes: 6MiB, tail: 1}}
  - apply_<n-4>: {after: AR_<n-4>}
"""
NOTE = "note: by_bytes.yaml: buckets of `bytes` were checked for modules of 4 MiB each"


def table(numel: int) -> str:
    modules = (
        Module(
            name=f"m{n}",
            parameters=(Parameter(name="weight", shape=(numel,)),),
            axes={Axis.REPLICATE: 2, Axis.SHARD: 2},
        )
        for n in range(12)
    )
    Path("table.json").write_text(ModuleTable(modules=tuple(modules)).model_dump_json())
    return "table.json"


@pytest.mark.parametrize("arguments", [(), ("--modules", "12")])
def test_without_sizes_it_says_what_it_took(run: Run, arguments: tuple[str, ...]) -> None:
    Path("by_bytes.yaml").write_text(BY_BYTES)
    result = run("check", "by_bytes.yaml", *arguments)
    assert result.code == 0
    assert NOTE in result.out


def test_with_sizes_it_finds_what_depends_on_them(run: Run) -> None:
    Path("by_bytes.yaml").write_text(BY_BYTES)
    assert run("check", "by_bytes.yaml", "--modules", table(1 << 20)).out == "no errors in 1 file\n"
    small = run("check", "by_bytes.yaml", "--modules", table(1 << 10))
    assert small.code == 1
    assert "CP102 apply_0 waits in post_backward 4 for AR_0-10" in small.out
    assert NOTE not in small.out


def test_where_no_size_matters_nothing_is_said(run: Run) -> None:
    assert run("check", "bucketed_pipeline_depth2").out == "no errors in 1 file\n"
