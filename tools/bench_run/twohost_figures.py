"""From what four ranks saw to figures, a table, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from bench_run import twohost_work as work_
from bench_run.twohost_work import best_schedules, slowest_s

EQUAL: Final = "equal"
_TITLES: Final = {work_.NATIVE: "stock FSDP2", work_.NATIVE_ASYNC: "stock FSDP2, async all-gather"}


@dataclass(frozen=True)
class Alone:
    """Seconds that the compute of all modules, and each kind of collective of all modules, take alone."""

    compute_s: float
    rs_s: float
    ar_s: float
    ag_s: float
    num_modules: int

    @property
    def limit_s(self) -> float:
        """What no order of ops can beat: all compute or all all-reduces in a row, and what must come before and after.

        Compute in a row needs the first all-gather before it; behind it the last module's reduce-scatter and all-reduce.
        All-reduces in a row begin behind the first module's all-gather, compute and reduce-scatter.
        """
        of_all = (self.compute_s, self.rs_s, self.ar_s, self.ag_s)
        compute_s, rs_s, ar_s, ag_s = (each_s / self.num_modules for each_s in of_all)
        return max(ag_s + self.compute_s + rs_s + ar_s, ag_s + compute_s + rs_s + self.ar_s)


def figures(setting: Mapping[str, Any], left_out: Mapping[str, str], num_modules: int) -> dict[str, Any]:
    """Plain data of one setting: medians over rounds of the slowest rank."""
    samples_s = slowest_s(setting["times_s"])
    medians_s = {name: median(found) for name, found in samples_s.items()}
    alone = Alone(
        compute_s=medians_s[work_.COMPUTE],
        rs_s=medians_s[work_.REDUCE_SCATTERS],
        ar_s=medians_s[work_.ALL_REDUCES],
        ag_s=medians_s[work_.ALL_GATHERS],
        num_modules=num_modules,
    )
    native_s, limit_s = medians_s[work_.NATIVE], alone.limit_s
    ranking = best_schedules(setting["times_s"])
    best = ranking[0] if ranking else None
    found: dict[str, Any] = {
        **asdict(alone),
        "limit_s": limit_s,
        "native_s": native_s,
        "native_async_s": medians_s[work_.NATIVE_ASYNC],
        "best_schedule": best,
        "best_s": medians_s[best] if best else None,
        "ratio_native": native_s / medians_s[best] if best else None,
        "ratio_limit": medians_s[best] / limit_s if best else None,
        "module_numel": setting["module_numel"],
        "schedules": {},
        "left_out": dict(left_out),
        "samples_s": {name: samples_s[name] for name in work_.NOT_SCHEDULES},
    }
    for name in ranking:
        seen = setting["seen"][name]
        difference = max(of_rank["difference"] for of_rank in seen)
        found["schedules"][name] = {
            "median_s": medians_s[name],
            "ratio_native": native_s / medians_s[name],
            "ratio_limit": medians_s[name] / limit_s,
            "peak_bytes": max(of_rank["peak_bytes"] for of_rank in seen),
            "gradients": difference or EQUAL,
            "note": _note(difference, seen[0]["tolerance"]),
            "samples_s": samples_s[name],
            "traces": [of_rank["trace"] for of_rank in seen],
        }
    if best:
        found["stretch"] = _stretch(setting["seen"][best], alone)
    return found


def _note(difference: float, tolerance: float) -> str:
    """What the schedule may do to gradients, of the largest one of a parameter, and whether it does more."""
    allowed = f"up to {tolerance:.1g} allowed" if tolerance else "none allowed"
    if difference > tolerance:
        return f"WRONG: {allowed}"
    return allowed if difference else ""


def _stretch(seen: Sequence[Mapping[str, Any]], alone: Alone) -> dict[str, float]:
    """How many times as long compute and collectives took beside one another as alone: medians over ranks."""
    found: dict[str, list[float]] = {work_.COMPUTE: [], work_.REDUCE_SCATTERS: [], work_.ALL_REDUCES: []}
    for of_rank in seen:
        trace = of_rank["trace"]
        computed_s = (trace["end"] - trace["begin"]) / 1e3 - trace["stats"]["commplan/compute_wait_s"]
        found[work_.COMPUTE].append(computed_s / alone.compute_s)
        for kind, family, alone_s in ((work_.REDUCE_SCATTERS, "RS_", alone.rs_s), (work_.ALL_REDUCES, "AR_", alone.ar_s)):
            ran_s = sum(end - begin for op, (_, begin, end) in trace["ops"].items() if op.startswith(family)) / 1e3
            found[kind].append(ran_s / alone_s)
    return {name: median(ratios) for name, ratios in found.items()}


def problems(found: Mapping[str, Any]) -> list[str]:
    """What must not be, one line each."""
    return [
        f"{setting}: {name}: gradients differ by {row['gradients']:.1e} of the largest; {row['note']}"
        for setting, of_setting in found.items()
        for name, row in of_setting["schedules"].items()
        if row["note"].startswith("WRONG")
    ]


def shown(found: Mapping[str, Any]) -> list[str]:
    """The figures for people, a table a setting."""
    lines: list[str] = []
    for setting, of_setting in found.items():
        lines += [*([""] if lines else []), *_table(setting, of_setting)]
    left_out = {name: why for of_setting in found.values() for name, why in of_setting["left_out"].items()}
    return [*lines, *(f"left out: {name}: {why}" for name, why in left_out.items())]


def _table(setting: str, found: Mapping[str, Any]) -> list[str]:
    link = found["link"]
    compute = "a transformer's own backward" if setting == work_.REAL else f"backward sleeps {setting} ms a module"
    lines = [
        f"{found['num_modules']} modules of {found['module_numel'] / 1e6:.2f} M fp32 parameters, mesh {work_.MESH}, "
        f"{link['rate_mbit']:g} Mbit/s between hosts; {compute}; medians of {found['rounds']}, the slowest rank's",
        f"  alone: compute {found['compute_s']:.3f} s, reduce-scatters {found['rs_s']:.3f} s, "
        f"all-reduces {found['ar_s']:.3f} s ({link['payload_mbit']:.0f} Mbit/s of data), all-gathers {found['ag_s']:.3f} s",
        f"  {'':<32}{'backward':>10}{'of limit':>10}{'stock is':>12}{'memory':>12}  gradients",
        _row("the limit", found["limit_s"], found),
        *(_row(title, found[f"{name}_s"], found) for name, title in _TITLES.items()),
    ]
    for name, row in found["schedules"].items():
        gradients = EQUAL if row["gradients"] == EQUAL else f"{row['gradients']:.1e} off; {row['note']}"
        memory = f"{row['peak_bytes'] / 2**20:,.1f} MiB"
        lines.append(f"{_row(name, row['median_s'], found)}{memory:>12}  {gradients}")
    if setting == work_.REAL and "stretch" in found:
        stretch = found["stretch"]
        lines.append(
            f"  {work_.WORLD_SIZE} processes share {found['machine']['cores']} cores, so whatever runs beside compute takes "
            f"its time from it: in {found['best_schedule']} compute took {stretch[work_.COMPUTE]:.2f} times as long as alone, "
            f"reduce-scatters {stretch[work_.REDUCE_SCATTERS]:.2f}, all-reduces {stretch[work_.ALL_REDUCES]:.2f} times. "
            "The limit holds where compute leaves the host alone."
        )
    return lines


def _row(title: str, backward_s: float, found: Mapping[str, Any]) -> str:
    of_limit, stock = backward_s / found["limit_s"], found["native_s"] / backward_s
    return f"  {title:<32}{backward_s:>8.3f} s{of_limit:>10.3f}{stock:>6.2f} times"
