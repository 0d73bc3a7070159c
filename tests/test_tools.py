"""What the programs in tools/ say where they cannot install; nothing is installed here."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = ("bash", "basename", "cat", "dirname", "flock", "mkdir", "rm", "sha256sum", "tail")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What of a checkout an installation looks at, and a folder `bin` with everything but Python."""
    root = tmp_path / "a check out"
    (root / "tools").mkdir(parents=True)
    shutil.copytree(ROOT / "tools" / "lib", root / "tools" / "lib")
    for name in ("tools/test", "tools/demo", "tools/constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (root / "bin").mkdir()
    for name in PROGRAMS:
        (root / "bin" / name).symlink_to(shutil.which(name) or pytest.skip(f"needs {name}"))
    return root


def start(root: Path, program: str = "tools/test") -> subprocess.CompletedProcess[str]:
    command = [str(root / program), "--version"]
    return subprocess.run(command, cwd="/", env={"PATH": str(root / "bin")}, capture_output=True, text=True, check=False)


def add_python(folder: Path, *, refuses: str) -> None:
    """A python3 that fails when a program it is given contains `refuses`."""
    folder.mkdir(parents=True, exist_ok=True)
    script = f'#!/bin/sh\ncase "$*" in *"{refuses}"*) exit 1;; esac\nexec "{sys.executable}" "$@"\n'
    (folder / "python3").write_text(script)
    (folder / "python3").chmod(0o755)


@pytest.mark.parametrize("program", ["tools/test", "tools/demo"])
@pytest.mark.parametrize(
    ("refuses", "message"),
    [
        (None, "no Python 3.11 or newer found; install the Debian packages python3 and python3-venv"),
        ("version_info < (3, 11)", "no Python 3.11 or newer found; install the Debian packages python3 and python3-venv"),
        ("ensurepip", f"install the Debian package python3.{sys.version_info.minor}-venv"),
    ],
)
def test_one_line_says_what_is_missing(checkout: Path, program: str, refuses: str | None, message: str) -> None:
    if refuses is not None:
        add_python(checkout / "bin", refuses=refuses)
    done = start(checkout, program)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{program}: ")
    assert done.stderr.endswith(f"{message}\n")
    assert done.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()


def test_an_environment_of_somebody_else_is_left_alone(checkout: Path) -> None:
    add_python(checkout / "bin", refuses="nothing at all")
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "pyvenv.cfg").write_text("theirs")
    done = start(checkout)
    assert done.returncode == 2
    assert "was not made by this program" in done.stderr
    assert (checkout / ".venv" / "pyvenv.cfg").read_text() == "theirs"


def test_an_installation_that_is_current_is_used_and_one_of_other_pins_is_not(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "ran $*"\n')
    python.chmod(0o755)
    text = f"{checkout}\n" + "".join((checkout / name).read_text() for name in ("pyproject.toml", "tools/constraints.txt"))
    (checkout / ".venv" / ".commplan-stamp").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  -\n")
    (checkout / ".venv" / ".commplan-made-this").touch()
    done = start(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran -m pytest --version\n", "")
    with (checkout / "tools" / "constraints.txt").open("a") as pins:
        pins.write("# another pin\n")
    assert "no Python 3.11" in start(checkout).stderr
