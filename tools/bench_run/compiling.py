"""How long checking and compiling take."""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

COUNTS = (100, 1_000, 10_000)
PROCESS_MODULES = 128
WARM_UP_MODULES = 8


@dataclass(frozen=True)
class ProcessTimes:
    """Whole processes, interleaved: medians in seconds, with the smallest and the largest."""

    schedule: str
    num_modules: int
    runs: int
    check_s: float
    check_range_s: tuple[float, float]
    import_torch_s: float
    import_torch_range_s: tuple[float, float]
    ratio: float


@dataclass(frozen=True)
class GrowthTimes:
    """Checking and compiling in one process: the median in seconds by number of modules, and the exponents of growth from
    each number to the next.
    """

    schedule: str
    runs: int
    check_and_compile_s: Mapping[int, float]
    exponents: tuple[float, ...]
    last_factor: float


def process_times(schedule: str, runs: int) -> ProcessTimes:
    """`commplan check` on one schedule against `import torch`, turn by turn; one run of each warms the caches of files."""
    check = [sys.executable, "-m", "commplan", "check", schedule, "--modules", str(PROCESS_MODULES)]
    torch = [sys.executable, "-c", "import torch"]
    checks: list[float] = []
    imports: list[float] = []
    for turn in range(runs + 1):
        for command, found in ((check, checks), (torch, imports)):
            begin_s = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if turn:
                found.append(time.perf_counter() - begin_s)
    check_s, import_s = statistics.median(checks), statistics.median(imports)
    return ProcessTimes(schedule, PROCESS_MODULES, runs, check_s, _range(checks), import_s, _range(imports), check_s / import_s)


def _range(times_s: Sequence[float]) -> tuple[float, float]:
    return min(times_s), max(times_s)


def growth_times(schedule: str, runs: int, counts: Sequence[int] = COUNTS) -> GrowthTimes:
    """`check` and `compile` by number of modules, turn by turn, in a process that collects garbage as `commplan` does."""
    from commplan import compiler
    from commplan.cli import YOUNG_OBJECTS

    times_s: dict[int, list[float]] = {count: [] for count in counts}
    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS)
    try:
        for turn in range(-1, runs):
            for count in counts if turn >= 0 else (WARM_UP_MODULES,):
                begin_s = time.perf_counter()
                compiler.check(schedule, count)
                compiler.compile(schedule, count)
                if turn >= 0:
                    times_s[count].append(time.perf_counter() - begin_s)
    finally:
        gc.set_threshold(*thresholds)
    medians = {count: statistics.median(found) for count, found in times_s.items()}
    exponents = tuple(math.log(medians[b] / medians[a]) / math.log(b / a) for a, b in pairwise(counts))
    return GrowthTimes(schedule, runs, medians, exponents, medians[counts[-1]] / medians[counts[-2]])


def measure(schedule: str, runs: int, counts: Sequence[int] = COUNTS) -> dict[str, Any]:
    """Both, as plain data."""
    return {"process": asdict(process_times(schedule, runs)), "growth": asdict(growth_times(schedule, runs, counts))}


def shown(figures: dict[str, Any]) -> list[str]:
    """The figures for people."""
    process, growth = figures["process"], figures["growth"]
    (fastest, slowest), (torch_fastest, torch_slowest) = process["check_range_s"], process["import_torch_range_s"]
    lines = [
        f"commplan check {process['schedule']} --modules {process['num_modules']}, whole process, medians of {process['runs']}",
        f"  check         {process['check_s']:7.3f} s  ({fastest:.3f} to {slowest:.3f})",
        f"  import torch  {process['import_torch_s']:7.3f} s  ({torch_fastest:.3f} to {torch_slowest:.3f})",
        f"  ratio         {process['ratio']:7.3f}",
        f"check and compile {growth['schedule']}, one process as `commplan` sets it up, medians of {growth['runs']}",
    ]
    exponents = ("", *(f"  grows as N^{exponent:.2f}" for exponent in growth["exponents"]))
    by_count = growth["check_and_compile_s"].items()
    lines += [f"  {count:>6} modules  {time_s:8.3f} s{told}" for (count, time_s), told in zip(by_count, exponents, strict=True)]
    return [*lines, f"  the last takes {growth['last_factor']:.1f} times the one before"]
