"""From measured backwards of two schedules to a profile, and from it to predictions of others, side by side with what was
measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from operator import itemgetter
from statistics import mean, median, pstdev
from typing import Any, Final

import commplan
from bench_run import twohost_work as work_
from bench_run.twohost_work import best_schedules, slowest_s
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.language.profiles import Profile
from commplan.ops import Axis
from commplan.simulate import costs, draws, report

CALIBRATION: Final = ("blocking", "prefetch_overlap")
"""In one nothing overlaps, and FSDP2 gathers; in the other everything does, and the plan gathers. Nothing queues in either, so
that each op takes what it takes. `commplan profile` runs the same two.
"""

MIN_DIFFERENCE: Final = 0.02
"""Schedules whose times are nearer than this part of the faster one's are not ranked."""

NUM_DRAWS: Final = 32
"""A prediction is the mean of so many, since what differs from one time to the next holds up whoever waits for it."""

Trace = Mapping[str, Any]
"""See `bench_run.twohost_measured.Backward`: one rank's backward, times in milliseconds."""

KINDS: Final = ("reduce_scatter", "all_reduce", "all_gather")
"""In the order of `twohost_work.SMALL`."""

Saw = Mapping[str, Any]
"""What all ranks saw in one setting: see `bench_run.twohost_measured.measure`."""


@dataclass(frozen=True)
class Setting:
    """What is varied: milliseconds of backward compute a module, and Mbit/s between hosts."""

    compute_ms: float
    rate_mbit: float

    def __str__(self) -> str:
        return f"{self.compute_ms:g} ms, {self.rate_mbit:g} Mbit/s"


@dataclass(frozen=True)
class Row:
    """One schedule in one setting. Seconds; exposed: compute stood still for any collective, FSDP2's own all-gathers among
    them, on the rank that was last.
    """

    setting: str
    schedule: str
    is_calibration: bool
    measured_s: float
    predicted_s: float
    measured_exposed_s: float
    predicted_exposed_s: float
    measured_peak_bytes: int
    predicted_peak_bytes: int

    @property
    def error(self) -> float:
        """Of the measured time."""
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def exposed_error(self) -> float:
        """Of the measured time of the backward."""
        return abs(self.predicted_exposed_s - self.measured_exposed_s) / self.measured_s


def table_of(num_modules: int, dim: int, num_replicate: int, num_shard: int) -> ModuleTable:
    """Modules of one square fp32 weight."""
    axes = {Axis.REPLICATE: num_replicate, Axis.SHARD: num_shard}
    weight = Parameter(name="weight", shape=(dim, dim))
    return ModuleTable(modules=tuple(Module(name=f"{n}", parameters=(weight,), axes=axes) for n in range(num_modules)))


def calibrated(saw: Saw, module: Module, setting: Setting) -> Profile:
    """What compute and communication cost, from all backwards of the schedules of `CALIBRATION`, and reductions, small
    collectives and copies alone.

    Of one backward means, since it takes the sum of what its modules take; of several the median, as of what is measured.

    Args:
        saw: with `twohost_work.COSTS` measured beside the schedules.
        module: each of the modules that ran.
    """
    alone_s = _alone_s(saw)
    latency_s = {kind: alone_s[name] for kind, name in zip(KINDS, work_.SMALL, strict=True)}
    copy_bytes_per_s = _speed(module.reduced_bytes, alone_s[work_.COPIES], 0.0)["bytes_per_s"]
    reduce_scatter_s, all_reduce_s = alone_s[work_.REDUCE_SCATTERS], alone_s[work_.ALL_REDUCES]
    reducing, gathering = (_rounds(saw, name) for name in CALIBRATION)
    of_rounds = [_took(*of_round, module.shard_size, setting) for of_round in zip(reducing, gathering, strict=True)]
    took_s = {name: median(of_round[name] for of_round in of_rounds) for name in of_rounds[0]}
    issue_s = took_s["issue"]
    # Between two modules each rank issues an all-gather, a reduce-scatter and an all-reduce; what is left are hooks.
    hooks_s = max(0.0, took_s["between_gathering"] - 3 * issue_s)
    # Where FSDP2 gathers, it copies there, and waits, for peers that come later, too. And there what is reduced is applied.
    copies_s = max(0.0, took_s["between_reducing"] - hooks_s - 2 * issue_s - took_s["apply"])
    return Profile.model_validate(
        {
            "name": f"two hosts, {setting}",
            "source": f"backwards of {' and '.join(CALIBRATION)}",
            "compute_s": {"default": setting.compute_ms / 1e3 + hooks_s, "jitter": took_s["compute_jitter"]},
            "axes": {
                Axis.SHARD: {
                    "link": "host",
                    "all_gather": _speed(module.gathered_bytes, took_s["all_gather"], latency_s["all_gather"]),
                    "reduce_scatter": _speed(module.reduced_bytes, reduce_scatter_s, latency_s["reduce_scatter"]),
                    "fsdp2_all_gather": _speed(module.gathered_bytes, took_s["fsdp2_all_gather"], latency_s["all_gather"]),
                },
                Axis.REPLICATE: {
                    "link": "network",
                    "all_reduce": _speed(module.shard_bytes, all_reduce_s, latency_s["all_reduce"]),
                },
            },
            "links": {
                "host": {"jitter": took_s["reduce_scatter_jitter"]},
                "network": {"jitter": took_s["all_reduce_jitter"]},
            },
            "host": {
                "issue_s": issue_s,
                "pack_bytes_per_s": copy_bytes_per_s,
                "unpack_bytes_per_s": copy_bytes_per_s,
                "packs_lone": False,
                "apply_s": took_s["apply"],
                "fsdp2_copy_bytes_per_s": _speed(module.gathered_bytes, copies_s, 0.0)["bytes_per_s"],
            },
            "fsdp2_gathers": "blocking",
        }
    )


def _took(reducing: Sequence[Trace], gathering: Sequence[Trace], num_shard: int, setting: Setting) -> dict[str, float]:
    """Means in seconds, by what takes them, in one backward of each schedule of `CALIBRATION`, and how much some of it differs
    from one time to the next; traces by rank.
    """
    num_ranks = len(reducing)
    shard_groups = [range(first, first + num_shard) for first in range(0, num_ranks, num_shard)]
    replicate_groups = [range(first, num_ranks, num_shard) for first in range(num_shard)]
    # Both are issued in one hook, one after the other.
    issues_ms = [
        issued - trace["ops"][op.replace("AR", "RS")][0]
        for trace in gathering
        for op, (issued, _, _) in trace["ops"].items()
        if op.startswith("AR")
    ]
    # In root the others are applied while the last all-reduce is under way.
    applies_ms = [trace["end"] - max(end for _, _, end in trace["ops"].values()) for trace in gathering]
    # A backward takes as long as on the rank that is last; others wait for it in their all-gathers, which is no cost of those.
    last = max(reducing, key=itemgetter("end"))
    waits_ms = [end - begin for begin, end in last["gathers"].values()]
    return {
        "issue": mean(issues_ms) / 1e3,
        "apply": mean(applies_ms) / 1e3,
        "fsdp2_all_gather": mean(waits_ms) / 1e3 if waits_ms else 0.0,
        "between_gathering": mean(_gaps_s(gathering, setting)),
        "compute_jitter": _compute_jitter(gathering, setting),
        "between_reducing": mean(_gaps_s([last], setting)),
        "all_gather": _slowest_s(gathering, "AG", shard_groups),
        "reduce_scatter_jitter": _jitter(gathering, "RS", shard_groups),
        "all_reduce_jitter": _jitter(gathering, "AR", replicate_groups),
    }


def moved(profile: Profile, known: Setting, setting: Setting) -> Profile:
    """`profile`, which holds for `known`, for other compute and another link: what its figures say of them, and no more."""
    data = profile.model_dump()
    before_s = data["compute_s"]["default"]
    data["compute_s"]["default"] += (setting.compute_ms - known.compute_ms) / 1e3
    # What differs are sleeps' ends and hooks, which are as long as before.
    data["compute_s"]["jitter"] *= before_s / data["compute_s"]["default"]
    data["axes"][Axis.REPLICATE]["all_reduce"]["bytes_per_s"] *= setting.rate_mbit / known.rate_mbit
    return Profile.model_validate(data | {"name": f"two hosts, {setting}"})


def compared(saw: Saw, profile: Profile, table: ModuleTable, setting: Setting, calibration: Sequence[str]) -> list[Row]:
    """Every schedule that was measured in a setting, the fastest first, and what is predicted of it; the profile is from those
    of `calibration`.
    """
    rows = []
    taken_s = slowest_s(saw["times_s"])
    for name in best_schedules(saw["times_s"]):
        plan = commplan.compile(name, table)
        drawn = draws(plan, costs(plan, profile), NUM_DRAWS)
        told = [report(one) for one in drawn.simulated]
        # Pairs of ranks share the link unevenly, and those that got more of it are over sooner, or wait for the others where
        # parameters are gathered. The time is that of the last.
        last = [max(of_round, key=itemgetter("end")) for of_round in _rounds(saw, name)]
        rows.append(
            Row(
                str(setting),
                name,
                name in calibration,
                median(taken_s[name]),
                drawn.mean_s,
                median(trace["stats"]["commplan/compute_wait_s"] for trace in last),
                mean(one.compute_wait_s() for one in told),
                max(of_rank["peak_bytes"] for of_rank in saw["seen"][name]),
                max(one.peak_bytes for one in told),
            )
        )
    return rows


def figures(rows: Sequence[Row], elsewhere: Sequence[Row]) -> dict[str, Any]:
    """Errors of what was predicted and not calibrated with, as plain data.

    Args:
        rows: predicted from the same setting.
        elsewhere: from another one.
    """
    predicted = [row for row in rows if not row.is_calibration]
    return {
        "mean_error": mean(row.error for row in predicted),
        "max_error": max(row.error for row in predicted),
        "kendall_tau": kendall_tau(rows),
        "max_exposed_error": max(row.exposed_error for row in predicted),
        "num_peaks_wrong": sum(row.measured_peak_bytes != row.predicted_peak_bytes for row in rows),
        "calibration": list(CALIBRATION),
        "elsewhere": {
            "mean_error": mean(row.error for row in elsewhere),
            "max_error": max(row.error for row in elsewhere),
            "kendall_tau": kendall_tau(elsewhere),
            "max_exposed_error": max(row.exposed_error for row in elsewhere),
            "rows": _as_data(elsewhere),
        },
        "rows": _as_data(rows),
    }


def _as_data(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"error": row.error, "exposed_error": row.exposed_error} for row in rows]


def kendall_tau(rows: Iterable[Row]) -> float:
    """Pairs of one setting in the right order less those in the wrong one, of all whose measured times differ enough."""
    by_setting: dict[str, list[Row]] = {}
    for row in rows:
        by_setting.setdefault(row.setting, []).append(row)
    signs = [
        (one.measured_s - other.measured_s) * (one.predicted_s - other.predicted_s)
        for of_setting in by_setting.values()
        for one, other in combinations(of_setting, 2)
        if abs(one.measured_s - other.measured_s) > MIN_DIFFERENCE * min(one.measured_s, other.measured_s)
    ]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs) if signs else 1.0


def shown(found: Mapping[str, Any]) -> list[str]:
    """A table, and the errors."""
    head = f"{'':22}{'schedule':30}{'measured':>10}{'predicted':>11}{'error':>8}{'exposed':>18}  peak"
    lines = [f"calibrated with {' and '.join(found['calibration'])} in each setting", head]
    for row in found["rows"]:
        error = row["predicted_s"] / row["measured_s"] - 1
        exposed = f"{row['measured_exposed_s']:.3f}, {row['predicted_exposed_s']:.3f}"
        peak = "exact" if row["measured_peak_bytes"] == row["predicted_peak_bytes"] else "WRONG"
        times = f"{row['measured_s']:>8.3f} s{row['predicted_s']:>9.3f} s{error:>+8.1%}"
        lines.append(f"{row['setting']:22}{row['schedule']:30}{times}{exposed:>18}  {peak}")
    lines.append(f"{_errors(found)}, over pairs that differ by more than {MIN_DIFFERENCE:.0%}")
    lines.append(f"in the other settings from a calibration in the first one: {_errors(found['elsewhere'])}")
    return lines


def _errors(found: Mapping[str, Any]) -> str:
    return (
        f"errors: mean {found['mean_error']:.1%}, largest {found['max_error']:.1%}; exposed time is off by "
        f"{found['max_exposed_error']:.1%} of a backward at most; Kendall's tau {found['kendall_tau']:.2f}"
    )


def problems(found: Mapping[str, Any]) -> list[str]:
    """What can't be put down to noise."""
    wrong = found["num_peaks_wrong"]
    return [f"the peak of {wrong} schedule(s) was predicted wrong"] if wrong else []


def _speed(size_bytes: int, seconds: float, latency_s: float) -> dict[str, float]:
    """Of what takes `seconds` in all."""
    latency_s = min(latency_s, seconds)
    return {"latency_s": latency_s, "bytes_per_s": size_bytes / (seconds - latency_s) if seconds > latency_s else 1e18}


def _alone_s(saw: Saw) -> dict[str, float]:
    """Seconds of one of each of `twohost_work.COSTS`: as many were measured in a row as there are modules."""
    taken_s, num = slowest_s(saw["times_s"]), len(saw["seen"][CALIBRATION[0]][0]["traces"][0]["compute"])
    return {name: median(taken_s[name]) / num for name in work_.COSTS}


def _rounds(saw: Saw, schedule: str) -> Sequence[Sequence[Trace]]:
    """The traces of a schedule: round -> rank -> trace."""
    return list(zip(*(of_rank["traces"] for of_rank in saw["seen"][schedule]), strict=True))


def _ops_s(traces: Sequence[Trace], kind: str) -> list[dict[str, float]]:
    """Seconds of each collective of this kind, on each rank."""
    return [{op: (end - begin) / 1e3 for op, (_, begin, end) in t["ops"].items() if op.startswith(f"{kind}_")} for t in traces]


def _of_groups_s(traces: Sequence[Trace], kind: str, groups: Sequence[Sequence[int]]) -> list[list[float]]:
    """What each collective of this kind takes in each group of ranks: what the last to come saw, nothing if it did not wait."""
    of_rank = _ops_s(traces, kind)
    ops = dict.fromkeys(op for ops in of_rank for op in ops)
    return [[min(of_rank[rank].get(op, 0.0) for rank in group) for group in groups] for op in ops]


def _slowest_s(traces: Sequence[Trace], kind: str, groups: Sequence[Sequence[int]]) -> float:
    """What a collective of this kind takes in the mean, in the slowest of the groups each time."""
    return mean([max(of_groups) for of_groups in _of_groups_s(traces, kind, groups)] or [0.0])


def _jitter(traces: Sequence[Trace], kind: str, groups: Sequence[Sequence[int]]) -> float:
    """How much that differs, in any group: standard deviation over mean."""
    took_s = [seconds for of_groups in _of_groups_s(traces, kind, groups) for seconds in of_groups]
    return pstdev(took_s) / mean(took_s) if any(took_s) else 0.0


def _compute_jitter(traces: Sequence[Trace], setting: Setting) -> float:
    """How much compute of a module, and the hooks behind it, differ on a rank: standard deviation over mean."""
    took_s = [[setting.compute_ms / 1e3 + gap_s for gap_s in _gaps_s([trace], setting)] for trace in traces]
    return mean(pstdev(of_rank) / mean(of_rank) for of_rank in took_s)


def _gaps_s(traces: Sequence[Trace], setting: Setting) -> list[float]:
    """Seconds from the begin of one module's compute to that of the next one, less those that it should take (a sleep takes a
    little longer) and less waits. Before the last one nothing is gathered ahead.
    """
    return [
        (then[0] - now[0] - setting.compute_ms - _waited(trace, now[1], then[0])) / 1e3
        for trace in traces
        for now, then in pairwise(trace["compute"][:-1])
    ]


def _waited(trace: Trace, begin: float, end: float) -> float:
    """Milliseconds between two times in which compute waited."""
    return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in trace["waits"])
