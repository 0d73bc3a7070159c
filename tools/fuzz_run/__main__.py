"""Throw random files at the checker: `python -m fuzz_run`, or `tools/fuzz`.

Every file is answered with findings or an error in words, and one of at most 100 kB within a second of processor time.
Exit status 1 where one is not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from commplan import compiler
from commplan.errors import CommplanError
from commplan.plan import Plan
from fuzz_run import inputs

MAX_S = 1.0
MAX_TRIES = 3
"""A file is slow if it is each time: what else runs on the machine is no fault of the checker."""

EXAMPLES = 20
MAX_SHOWN_CHARS = 2_000


@dataclass
class Tally:
    """What came of the files so far."""

    files: Counter[str] = field(default_factory=Counter)
    answered_well: Counter[str] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    failures: dict[tuple[str, str], tuple[str, bytes]] = field(default_factory=dict)

    def tell(self, target: str, time_s: float, data: bytes, *, fine: bool) -> None:
        """Count one file; `fine` says that nothing was wrong with it."""
        self.files[target] += 1
        self.answered_well[target] += fine
        self.slowest_s[target] = max(time_s, self.slowest_s.get(target, 0.0))
        if time_s > MAX_S and len(data) <= inputs.MAX_FILE_BYTES:
            self.slow.append(f"{target}: {time_s:.1f} s for {len(data)} bytes: {_shown(data)}")

    def fail(self, target: str, error: Exception, data: bytes) -> None:
        """Note a failure, by what was raised and where."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        key = (target, f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}")
        if key not in self.failures or len(data) < len(self.failures[key][1]):
            self.failures[key] = str(error), data


def _shown(data: bytes) -> str:
    text = repr(data)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"


def _check_file(path: Path) -> bool:
    return not compiler.check(path)


def _check_few(path: Path) -> bool:
    return not compiler.check(path, 5)


def _compile_few(path: Path) -> bool:
    with suppress(CommplanError):
        plan = compiler.compile(path, 5)
        if Plan.from_json(plan.to_json()) != plan:
            raise AssertionError("a plan that is not what its JSON says")
        return True
    return False


def _check_table(path: Path) -> bool:
    compiler.check("delayed_allreduce", path)
    return True


def _read_plan(path: Path) -> bool:
    Plan.from_json(path.read_text(encoding="utf-8", errors="replace"))
    return True


TARGETS: Mapping[str, tuple[st.SearchStrategy[bytes], Callable[[Path], bool]]] = {
    "texts": (inputs.texts(), _check_file),
    "schedules": (inputs.schedules(), _check_file),
    "schedules for 5 modules": (inputs.schedules(), _check_few),
    "compiled for 5 modules": (inputs.schedules(), _compile_few),
    "module tables": (inputs.module_tables(), _check_table),
    "plans": (inputs.plans(), _read_plan),
}


def main(arguments: list[str] | None = None) -> int:
    """Fuzz for some time; the exit status."""
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="begin with this one (default: another each time)")
    options = parser.parse_args(arguments)
    first = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {first}")
    tally = Tally()
    end_s = time.monotonic() + options.minutes * 60
    number = first
    while True:
        for target in TARGETS:
            _round(target, number, tally, end_s)
        number += 1
        if time.monotonic() > end_s:
            break
    print("\n".join(lines(tally)))
    return 1 if tally.slow or tally.failures else 0


def _round(target: str, number: int, tally: Tally, end_s: float) -> None:
    """Some files of one kind."""
    strategy, action = TARGETS[target]

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(data: bytes) -> None:
        if time.monotonic() < end_s or not tally.files[target]:
            _try_file(target, action, data, tally)

    one()


def _try_file(target: str, action: Callable[[Path], bool], data: bytes, tally: Tally) -> None:
    """One file: count it, and note what it shows. Of files that fail alike the smallest is kept."""
    times_s: list[float] = []
    fine = False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.yaml"
        path.write_bytes(data)
        while not times_s or (times_s[-1] > MAX_S and len(times_s) < MAX_TRIES):
            begin_s = time.process_time()
            try:
                fine = action(path)
            except CommplanError as error:
                str(error).encode("utf-8")
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure to report
                tally.fail(target, error, data)
            times_s.append(time.process_time() - begin_s)
    tally.tell(target, min(times_s), data, fine=fine)


def lines(tally: Tally) -> list[str]:
    """The counts, then every failure and every slow file."""
    found = [f"{'':<26}{'files':>9}{'without a finding':>19}{'slowest, s':>12}"]
    for target in TARGETS:
        slowest_s = tally.slowest_s.get(target, 0.0)
        found.append(f"{target:<26}{tally.files[target]:>9}{tally.answered_well[target]:>19}{slowest_s:>12.2f}")
    found.append(f"{len(tally.failures)} failures, {len(tally.slow)} files over {MAX_S:.0f} s")
    for (target, what), (told, data) in tally.failures.items():
        found.append(f"{target}, {what}: {told[:MAX_SHOWN_CHARS]}\n  {_shown(data)}")
    return [*found, *tally.slow[:20]]


if __name__ == "__main__":
    sys.exit(main())
