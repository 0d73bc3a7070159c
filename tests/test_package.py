"""What an installed commplan carries, and what it does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCHEDULES = sorted(path.name for path in (ROOT / "schedules").glob("*.yaml"))

LOADED = """
import json, sys
{code}
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def modules_after(code: str, **environment: str) -> set[str]:
    """The top-level modules that a fresh process has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(code=code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


RUN = """
import commplan.cli
try:
    commplan.cli.main({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize(
    "code",
    [
        "import commplan",
        "import commplan; commplan.compile('pipelined_allreduce', 4)",
        RUN.format(arguments=["check", *(f"schedules/{name}" for name in SCHEDULES)]),
        RUN.format(arguments=["plan", "pipelined_allreduce", "--modules", "4"]),
        RUN.format(arguments=["list"]),
        RUN.format(arguments=["explain"]),
        RUN.format(arguments=["diff", "blocking", "blocking", "--modules", "4"]),
        RUN.format(arguments=["schema"]),
        "import commplan.picture",
        RUN.format(arguments=["estimate", "llama3-8b", "--node", "dgx-h100", "--shard", "8", "-o", os.devnull]),
    ],
    ids=["import", "compile", "check", "plan", "list", "explain", "diff", "schema", "picture", "estimate"],
)
def test_torch_is_not_loaded(code: str) -> None:
    loaded = modules_after(code)
    assert "commplan" in loaded
    assert not loaded & {"torch", "numpy", "torch_npu"}


def test_the_guard_would_see_torch() -> None:
    assert "torch" in modules_after("import commplan.execute.workers, torch")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    pytest.importorskip("hatchling", reason="builds a wheel")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_schedules_types_and_nothing_else(wheel: Path) -> None:
    assert sorted(path.name for path in (wheel / "commplan" / "schedules").iterdir()) == SCHEDULES
    assert (wheel / "commplan" / "py.typed").is_file()
    assert {path.name for path in wheel.iterdir()} == {"commplan", f"commplan-{version('commplan')}.dist-info"}


def test_the_wheel_carries_presets(wheel: Path) -> None:
    folder = Path("commplan", "estimate", "presets")
    found, expected = (sorted(path.relative_to(base) for path in (base / folder).rglob("*.yaml")) for base in (wheel, ROOT))
    assert len(expected) >= 5
    assert found == expected


def test_the_wheel_finds_its_schedules(wheel: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "commplan", "check", "pipelined_allreduce", "--format", "json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=True,
    )
    (report,) = json.loads(done.stdout)["files"]
    assert Path(report["file"]) == wheel / "commplan" / "schedules" / "pipelined_allreduce.yaml"
    assert report["findings"] == []


PAGE = """
from commplan.picture import content, page
from commplan.sight.report import BackwardReport
from commplan.sight.runs import Run
print(page(content([], [Run(0, {}, 0.0, BackwardReport(0.0, 1.0, [], [], 0, 0))])).html)
"""


def test_the_wheel_writes_the_page_that_the_checkout_does(wheel: Path, tmp_path: Path) -> None:
    pages = [
        subprocess.run(
            [sys.executable, "-P", "-c", PAGE],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for root in (wheel, ROOT)
    ]
    assert pages[0] == pages[1]
    assert pages[0].startswith("<!DOCTYPE html>")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import commplan
try:
    commplan.attach
except ModuleNotFoundError as error:
    print(error.name, error)
"""


def test_without_torch_attach_says_what_to_install_and_the_rest_works() -> None:
    code = WITHOUT_TORCH + "print(commplan.compile('pipelined_allreduce', 2).num_waits)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    said, waits = done.stdout.splitlines()
    assert said.startswith("torch commplan.attach needs torch")
    assert "pip install torch" in said
    assert int(waits) > 0
