"""How good the schedules are that `commplan tune` finds: against brute force, against the library, and on two hosts."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench_run import truth_figures
from bench_run.refusal import RefusedError
from bench_run.truth_figures import CALIBRATION, Setting
from bench_run.twohost import measure_work, run_work
from bench_run.twohost_work import COSTS, MESH, Work
from commplan.language.modules import DEFAULT_SHAPE, ModuleTable
from commplan.language.profiles import Profile
from commplan.tune import ROOT, Candidate, Goal, Search

LOGS: Final = Path(__file__).resolve().parents[2] / "runs" / "bench_tuner"

MODULES: Final = (2, 4, 6, 8)
RATIOS: Final = ((0.1, 0.3), (0.3, 1.0), (0.2, 3.0), (1.0, 0.4), (1.5, 1.5))
"""Seconds of a reduce-scatter and of an all-reduce, where backward of a module takes one."""
MANY_MODULES: Final = 128
RATE_MBIT: Final = 400.0
COMPUTE_MS: Final = "180"
WHOLE_BYTES: Final = 4 * DEFAULT_SHAPE[0] * DEFAULT_SHAPE[1]


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `tools/bench tuner`."""
    told = "backwards on two hosts of each schedule, the median counts (%(default)s)"
    command.add_argument("--rounds", dest="runs", type=int, default=5, metavar="N", help=told)


def profile(rs_s: float, ar_s: float) -> Profile:
    """Modules of `ModuleTable.uniform` on a mesh of (2, 2), of which compute takes a second each; a tenth is latency."""

    def taking(seconds: float, size_bytes: int) -> Mapping[str, float]:
        return {"latency_s": seconds / 10, "bytes_per_s": size_bytes / (seconds * 0.9)}

    shard = {"link": "a", "reduce_scatter": taking(rs_s, WHOLE_BYTES), "all_gather": taking(rs_s * 0.8, WHOLE_BYTES)}
    replicate = {"link": "b", "all_reduce": taking(ar_s, WHOLE_BYTES // 2)}
    axes = {"shard": shard, "replicate": replicate}
    told = {"name": f"1 : {rs_s:g} : {ar_s:g}", "compute_s": {"default": 1}, "axes": axes, "host": {"issue_s": 0.005}}
    return Profile.model_validate(told | {"fsdp2_gathers": "blocking"})


def every_one(num_modules: int) -> Iterator[Candidate]:
    """Offsets 0 to 2 of RS, AR and apply, buckets of every size, with and without gathering, and with two waits."""
    sizes = range(1, num_modules + 1)
    for rs, ar, applied, inputs, rs_fuse, ar_fuse, gather in itertools.product(
        (0, 1, 2), (0, 1, 2, ROOT), (0, 1, 2, ROOT), (1, 2), sizes, sizes, (0, 1)
    ):
        yield Candidate(rs, ar, applied, inputs, rs_fuse=rs_fuse, ar_fuse=ar_fuse, gather=gather)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Ratios, times and, where namespaces can be made, what two hosts measure."""
    with ProcessPoolExecutor() as pool:
        # The longest first.
        waiting = [pool.submit(_row, count, profile(*ratio)) for count in reversed(MODULES) for ratio in RATIOS]
        rows = [one.result() for one in reversed(waiting)]
    begin_s = time.perf_counter()
    many = Search(Goal(ModuleTable.uniform(MANY_MODULES), profile(*RATIOS[1])))
    many.best()
    many_s = time.perf_counter() - begin_s
    try:
        two_hosts: dict[str, Any] | str = _on_two_hosts(options.runs)
    except RefusedError as refused:
        two_hosts = str(refused)
    return {
        "max_ratio_brute_force": max(row["ratio_brute_force"] for row in rows),
        "max_ratio_library": max(row["ratio_library"] for row in rows),
        "num_caps_broken": sum(row["peak_under_cap_bytes"] > row["cap_bytes"] for row in rows),
        "many_modules": MANY_MODULES,
        "many_modules_s": many_s,
        "two_hosts": two_hosts,
        "rows": rows,
    }


def _row(num_modules: int, of: Profile) -> dict[str, Any]:
    print(f"{num_modules} modules, {of.name}", file=sys.stderr)
    table = ModuleTable.uniform(num_modules)
    search = Search(Goal(table, of))
    best = search.best()
    num_tried = search.num_tried
    brute = min((found for one in every_one(num_modules) if (found := search.try_candidate(one))), key=lambda f: f.seconds)
    cap_bytes = 2 * min(found.peak_bytes for found in search.library_ranking())
    under_cap = Search(Goal(table, of, cap_bytes)).best()
    return {
        "modules": num_modules,
        "ratios": of.name,
        "tuned_s": best.seconds,
        "brute_force_s": brute.seconds,
        "library_s": search.library_ranking()[0].seconds,
        "ratio_brute_force": best.seconds / brute.seconds,
        "ratio_library": best.seconds / search.library_ranking()[0].seconds,
        "tried": num_tried,
        "tried_by_brute_force": search.num_tried,
        "cap_bytes": cap_bytes,
        "peak_under_cap_bytes": under_cap.peak_bytes,
        "under_cap_s": under_cap.seconds,
    }


def _on_two_hosts(rounds: int) -> dict[str, Any]:
    """Calibrate, tune, and measure what was found beside the best of the library."""
    setting = Setting(float(COMPUTE_MS), RATE_MBIT)
    calibration = Work(CALIBRATION, (COMPUTE_MS,), rounds=5, beside=COSTS)
    saw = run_work(calibration, RATE_MBIT, LOGS)["settings"][COMPUTE_MS]
    table = truth_figures.table_of(calibration.num_modules, calibration.dim, *MESH)
    search = Search(Goal(table, truth_figures.calibrated(saw, table.modules[0], setting)))
    best, library = search.best(), search.library_ranking()[0].simulated.plan.schedule
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tuned.yaml")
        path.write_text(best.text, encoding="utf-8")
        work = Work((library, str(path)), (COMPUTE_MS,), rounds=rounds)
        found = measure_work(work, RATE_MBIT, LOGS)[COMPUTE_MS]["schedules"]
        tuned, beside = found[str(path)], found[library]
    return {
        "schedule": best.text,
        "predicted_s": best.seconds,
        "tuned_s": tuned["median_s"],
        "library": library,
        "library_s": beside["median_s"],
        "ratio_library": tuned["median_s"] / beside["median_s"],
        "tuned_peak_bytes": tuned["peak_bytes"],
        "library_peak_bytes": beside["peak_bytes"],
        "gradients": tuned["gradients"],
    }


def shown(found: Mapping[str, Any]) -> list[str]:
    """A table, and the rest in words."""
    head = f"{'modules':>7}  {'compute : RS : AR':18}{'tuned':>10}{'brute force':>13}{'library':>10}{'tried':>7}"
    lines = [f"{head}  of brute force, of the library"]
    for row in found["rows"]:
        times = f"{row['tuned_s']:>8.2f} s{row['brute_force_s']:>11.2f} s{row['library_s']:>8.2f} s{row['tried']:>7}"
        ratios = f"{row['ratio_brute_force']:.3f}, {row['ratio_library']:.3f}"
        lines.append(f"{row['modules']:>7}  {row['ratios']:18}{times}  {ratios}")
    lines.append(
        f"at most {found['max_ratio_brute_force']:.3f} of brute force and {found['max_ratio_library']:.3f} of the best of the "
        f"library; caps broken: {found['num_caps_broken']}; {found['many_modules']} modules in {found['many_modules_s']:.1f} s"
    )
    two = found["two_hosts"]
    if isinstance(two, str):
        return [*lines, f"two hosts: not measured: {two}"]
    tuned = f"{two['tuned_s']:.3f} s with {_mib(two['tuned_peak_bytes'])}, predicted {two['predicted_s']:.3f} s"
    library = f"{two['library_s']:.3f} s with {_mib(two['library_peak_bytes'])}"
    lines.append(f"two hosts: {tuned}; {two['library']}, the best of the library: {library}; gradients {two['gradients']}")
    return [*lines, "", two["schedule"].rstrip()]


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def problems(found: Mapping[str, Any]) -> list[str]:
    """What can't be put down to noise."""
    wrong = []
    if found["num_caps_broken"]:
        wrong.append(f"{found['num_caps_broken']} cap(s) on memory were not kept")
    if found["max_ratio_library"] > 1 + 1e-6:
        wrong.append("the library has a faster schedule than what was found")
    return wrong
