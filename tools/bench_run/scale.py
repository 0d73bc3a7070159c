"""What a plan costs in time and memory as modules and ranks grow. All ranks but one are fake: no network is measured."""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from commplan.language import library

HOST_RANKS: Final = 8
"""Ranks of one host, which share one copy of the parameters."""

FIGURES: Final[Mapping[str, tuple[str, float, str]]] = {
    "compile_s": ("compile", 1e3, "ms"),
    "describe_s": ("describe the model", 1e3, "ms"),
    "attach_s": ("attach, describing, compiling and agreeing included", 1e3, "ms"),
    "backward_s": ("host, one backward", 1e3, "ms"),
    "native_s": ("host, one backward of stock FSDP2", 1e3, "ms"),
    "plan_bytes": ("plan", 1e-3, "kB"),
    "attachment_bytes": ("attachment, its plan included", 1e-3, "kB"),
    "rss_bytes": ("resident memory, attach and a backward", 1e-3, "kB"),
    "num_requests": ("store requests of a rank", 1.0, ""),
    "num_requests_last": ("store requests of the last rank to come", 1.0, ""),
    "moved_bytes": ("bytes to and from the store, last rank", 1e-3, "kB"),
}
"""Name -> what it is, its factor and unit in the table."""

Point = dict[str, Any]


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `tools/bench scale`."""
    command.add_argument("--schedule", default="overlapped_allreduce", choices=library.names(), metavar="NAME")
    command.add_argument("--runs", type=int, default=5, help="backwards of each, the median counts (%(default)s)")
    command.add_argument("--modules", type=_counts, default=(100, 300, 1000), metavar="N,N", help="(100,300,1000)")
    command.add_argument("--ranks", type=_ranks, default=(4, 64, 512, 4096), metavar="N,N", help="(4,64,512,4096)")


def _counts(text: str) -> tuple[int, ...]:
    found = tuple(sorted({int(part) for part in text.split(",")}))
    if len(found) < 2 or found[0] < 1:
        raise argparse.ArgumentTypeError("two or more numbers, as in 100,1000")
    return found


def _ranks(text: str) -> tuple[int, ...]:
    found = _counts(text)
    for count in found:
        if count < 4 or count % mesh_shape(count)[1]:
            raise argparse.ArgumentTypeError(f"numbers of ranks on a mesh: 4, 6, 8, ..., and multiples of {HOST_RANKS} beyond")
    return found


def mesh_shape(num_ranks: int) -> tuple[int, int]:
    """Replicas and ranks of each: one replica a host, two at least."""
    num_shard = min(HOST_RANKS, num_ranks // 2)
    return num_ranks // num_shard, num_shard


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures, as plain data: each point of the two axes in a process of its own, and the far corner."""
    modules, ranks = options.modules, options.ranks
    wanted = [*((m, ranks[0]) for m in modules), *((modules[0], r) for r in ranks[1:]), (modules[-1], ranks[-1])]
    points = [in_own_process(options.schedule, m, r, options.runs) for m, r in dict.fromkeys(wanted)]
    return {"schedule": options.schedule, "process_group": "fake", "runs": options.runs, "points": points, **growth(points)}


def in_own_process(schedule: str, num_modules: int, num_ranks: int, runs: int) -> Point:
    """One point, in a process that has held nothing else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_point, schedule, num_modules, num_ranks, runs).result()


def measure_point(schedule: str, num_modules: int, num_ranks: int, runs: int) -> Point:
    """One point, in this process."""
    from bench_run import scale_work

    return scale_work.measure(schedule, num_modules, num_ranks, runs)


def growth(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Exponents of each figure, from the smallest to the largest number of modules, and of ranks."""
    few_modules, few_ranks = min(p["modules"] for p in points), min(p["ranks"] for p in points)
    of_modules = sorted((p for p in points if p["ranks"] == few_ranks), key=lambda p: p["modules"])
    of_ranks = sorted((p for p in points if p["modules"] == few_modules), key=lambda p: p["ranks"])
    return {
        "exponents_of_modules": _exponents(of_modules[0], of_modules[-1], "modules"),
        "exponents_of_ranks": _exponents(of_ranks[0], of_ranks[-1], "ranks"),
    }


def _exponents(first: Point, last: Point, axis: str) -> dict[str, float]:
    step = math.log(last[axis] / first[axis])
    return {name: math.log(last[name] / first[name]) / step for name in FIGURES if first[name] > 0 and last[name] > 0}


def shown(figures: dict[str, Any]) -> list[str]:
    """The figures for people."""
    points = figures["points"]
    lines = [
        f"{figures['schedule']}, modules of 9 parameters; a fake process group: of all ranks one is real, and nothing travels",
        f"{'modules':>56}" + "".join(f"{point['modules']:>10}" for point in points) + "   grows as",
        f"{'ranks':>56}" + "".join(f"{point['ranks']:>10}" for point in points) + "   modules  ranks",
    ]
    for name, (told, factor, unit) in FIGURES.items():
        values = "".join(f"{point[name] * factor:10,.{1 if unit == 'ms' else 0}f}" for point in points)
        powers = [figures[f"exponents_of_{axis}"].get(name) for axis in ("modules", "ranks")]
        grows = "".join(f"{'' if power is None else f'N^{power:.2f}':>8}" for power in powers)
        lines.append(f"{told + (f', {unit}' if unit else ''):>56}{values}{grows}")
    return [
        *lines,
        f"medians of {figures['runs']} (attach: of 3); exponents: from the least to the most, with the least of the other axis",
    ]
