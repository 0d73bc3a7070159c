"""What the host pays in backward: microseconds a module for plain autograd, stock FSDP2, and FSDP2 under a schedule.

Collectives are those of a fake process group, which end at once, and modules are small, so that hardly more than the host's
own work is left. All take turns in one process.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from commplan.language import library

MESH: Final = (2, 2)
PARAMETERS: Final = 9
PREFETCH_SCHEDULE: Final = "prefetch_overlap"

TOLD: Final[Mapping[str, str]] = {
    "plain": "plain autograd",
    "native": "stock FSDP2",
    "commplan": "{schedule}",
    "commplan_prefetch": "{prefetch_schedule}",
    "commplan_streams": "{schedule}, streams",
    "commplan_prefetch_streams": "{prefetch_schedule}, streams",
}
"""What is measured, by the name of its figures. Lanes are a CPU's worker threads, or streams as on a GPU."""


@dataclass(frozen=True)
class Setting:
    """One measurement: `modules` is what counts, `growth` are further numbers of modules."""

    schedule: str
    modules: int
    growth: tuple[int, ...]
    runs: int

    @property
    def counts(self) -> tuple[int, ...]:
        """All numbers of modules, ascending."""
        return tuple(sorted({self.modules, *self.growth}))


@dataclass
class Times:
    """Seconds of each backward: by the clock on the wall, and of the processor on the thread that runs backward."""

    wall_s: list[float]
    thread_s: list[float]


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `tools/bench host`."""
    command.add_argument(
        "--schedule",
        default="overlapped_allreduce",
        choices=library.names(),
        metavar="NAME",
        help=f"one that leaves all-gathers to FSDP2, besides {PREFETCH_SCHEDULE} (%(default)s)",
    )
    command.add_argument("--runs", type=int, default=10, help="backwards of each, the median counts (%(default)s)")
    command.add_argument("--modules", type=_count, default=200, help=f"modules of {PARAMETERS} parameters (%(default)s)")
    command.add_argument(
        "--growth", type=_counts, default=(50, 800), metavar="N,N", help="further numbers of modules, to see growth (50,800)"
    )


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(",") if part)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures, as plain data. Those that could not be had are None, and `left_out` says why."""
    from bench_run import host_work

    setting = Setting(options.schedule, options.modules, options.growth, options.runs)
    return figures(setting, *host_work.take_turns(setting))


def figures(
    setting: Setting,
    times: Mapping[tuple[int, str], Times],
    on_one_core: Mapping[str, Times],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """Medians and ratios of what was measured, by number of modules and name; see `host_work.take_turns`."""

    def us(count: int, found: Times | None, of: Callable[[Times], Sequence[float]]) -> float | None:
        return None if found is None else statistics.median(of(found)) / count * 1e6

    wall = {count: {name: us(count, times.get((count, name)), lambda t: t.wall_s) for name in TOLD} for count in setting.counts}
    found = wall[setting.modules]
    one_core = {name: us(setting.modules, on_one_core.get(name), lambda t: t.wall_s) for name in TOLD}
    ratios = _ratios(found)
    return {
        **asdict(setting),
        "prefetch_schedule": PREFETCH_SCHEDULE,
        "parameters": PARAMETERS,
        "mesh": MESH,
        "process_group": "fake",
        "rank_checks": "backward",
        **{f"{name}_us": value for name, value in found.items()},
        "ratio_native": min(
            (ratio for name in ("commplan", "commplan_prefetch") if (ratio := ratios[name]) is not None), default=None
        ),
        "ratios": ratios,
        "thread_us": {name: us(setting.modules, times.get((setting.modules, name)), lambda t: t.thread_s) for name in TOLD},
        "one_core_us": one_core,
        "one_core_ratios": _ratios(one_core),
        "us_by_modules": wall,
        "exponents": {name: _exponent({count: of_count[name] for count, of_count in wall.items()}) for name in TOLD},
        "left_out": dict(left_out),
    }


def _ratios(us: Mapping[str, float | None]) -> dict[str, float | None]:
    """Of stock FSDP2."""
    native_us = us["native"]
    return {name: None if value is None or native_us is None else value / native_us for name, value in us.items()}


def _exponent(us_by_count: Mapping[int, float | None]) -> float | None:
    """How the whole backward grows with the number of modules, from the smallest to the largest."""
    (few, few_us), (many, many_us) = min(us_by_count.items()), max(us_by_count.items())
    if few == many or few_us is None or many_us is None:
        return None
    return 1 + math.log(many_us / few_us) / math.log(many / few)


def shown(figures: dict[str, Any]) -> list[str]:
    """The figures for people."""
    counts = list(figures["us_by_modules"])
    lines = [
        f"microseconds a module in backward: {figures['modules']} modules of {figures['parameters']} parameters, mesh "
        f"{tuple(figures['mesh'])}, rank checks on; medians of {figures['runs']} backwards, in turn",
        f"{'':32}{'us':>6}{'of stock':>10}{'on one core':>13}{'main thread':>13}{'grows as':>10}"
        + "".join(f"{f'{count} modules':>14}" for count in counts),
    ]
    for name, told in TOLD.items():
        if figures[f"{name}_us"] is None:
            continue
        exponent, on_one_core = figures["exponents"][name], figures["one_core_ratios"][name]
        lines.append(
            f"{told.format_map(figures):32}{figures[f'{name}_us']:6.0f}{figures['ratios'][name]:10.2f}"
            f"{'' if on_one_core is None else f'{on_one_core:.2f}':>13}"
            f"{figures['thread_us'][name]:13.0f}{'' if exponent is None else f'N^{exponent:.2f}':>10}"
            + "".join(f"{figures['us_by_modules'][count][name]:14.0f}" for count in counts)
        )
    return [
        *lines,
        "a fake process group: collectives end at once and move nothing. Lanes are a CPU's worker threads, or streams as on a",
        "GPU of a device that costs nothing. On one core: of stock, where no thread is woken on another core. Main thread:",
        "processor time of the thread that runs backward.",
        *(f"left out: {schedule}: {why}" for schedule, why in figures["left_out"].items()),
    ]
