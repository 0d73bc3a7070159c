"""How near to the limit backward comes on two hosts with a slow link between them, and how much faster than stock FSDP2."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from demo_run.launch import watch

from bench_run import twohost_work as work_
from bench_run.twohost_figures import figures
from bench_run.twohost_network import CONGESTION_CONTROL, INTERFACE, Host, ended_by_signals, refuse_if_impossible, two_hosts
from bench_run.twohost_work import Work
from commplan.language import library

LOGS: Final = Path(__file__).resolve().parents[2] / "runs" / "bench_twohost"
_SILENCE_S: Final = 120.0
_LONGEST_MS: Final = 10_000


def add_options(command: argparse.ArgumentParser) -> None:
    """The options of `tools/bench twohost`."""
    told = "backwards of each, the median counts (%(default)s)"
    command.add_argument("--rounds", dest="runs", type=int, default=5, metavar="N", help=told)
    command.add_argument("--modules", type=_count, default=12, metavar="N", help="modules of one weight (%(default)s)")
    command.add_argument(
        "--rate", type=_rate, default=400.0, metavar="MBIT", help="of the link, in Mbit/s each way (%(default)g)"
    )
    command.add_argument(
        "--compute",
        type=_settings,
        default=(),
        metavar="MS,MS",
        help="after 180 ms of backward compute a module, these too, with the five best schedules; `real`: a transformer's own",
    )
    command.add_argument("--schedules", type=_schedules, default=library.names(), metavar="A,B", help="of the library (all)")


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def _rate(text: str) -> float:
    if not 1 <= float(text) <= 10_000:
        raise argparse.ArgumentTypeError("between 1 and 10000 Mbit/s")
    return float(text)


def _settings(text: str) -> tuple[str, ...]:
    found = []
    for part in text.split(","):
        if part != work_.REAL and not 0 <= float(part) <= _LONGEST_MS:
            told = f"milliseconds, at most {_LONGEST_MS}, or {work_.REAL}, as in 50,100,{work_.REAL}"
            raise argparse.ArgumentTypeError(told)
        found.append(part if part == work_.REAL else f"{float(part):g}")
    # Another model is needed for real compute: it comes last.
    return tuple(sorted(dict.fromkeys(found), key=lambda setting: setting == work_.REAL))


def _schedules(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if unknown := sorted(set(names) - set(library.names())):
        raise argparse.ArgumentTypeError(f"no schedule {', '.join(unknown)} in the library: {', '.join(library.names())}")
    return names


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures by setting; see `measure_work`."""
    default = Work(options.schedules)
    settings = tuple(dict.fromkeys((*default.settings, *options.compute)))
    work = Work(options.schedules, settings, options.modules, rounds=options.runs)
    return measure_work(replace(work, timeout_s=work.timeout_s + work.longest_s(options.rate)), options.rate, LOGS)


def measure_work(work: Work, rate_mbit: float, logs: Path) -> dict[str, Any]:
    """Milliseconds of compute a module, or "real" -> figures. See `run_work`."""
    result = run_work(work, rate_mbit, logs)
    context = {"link": result["link"], "rounds": work.rounds, "machine": result["machine"], "torch": result["torch"]}
    return {setting: _with_context(work, found, result["left_out"], context) for setting, found in result["settings"].items()}


def run_work(work: Work, rate_mbit: float, logs: Path) -> dict[str, Any]:
    """What the ranks saw, with the machine and the link.

    Args:
        rate_mbit: of the link between the hosts, each way.
        logs: where the workers' standard error goes.

    Raises:
        RefusedError: not root, or no network namespaces.
        WorkerError: a worker failed, or all fell silent; none is left, and neither is the network.
    """
    refuse_if_impossible()
    logs.mkdir(parents=True, exist_ok=True)
    with ended_by_signals(), tempfile.TemporaryDirectory() as folder, two_hosts(rate_mbit) as hosts:
        work_path, result_path = Path(folder, "work.json"), Path(folder, "result.json")
        work.save(work_path)
        commands = []
        for rank in range(work_.WORLD_SIZE):
            worker = [sys.executable, "-m", "bench_run.twohost_worker", str(work_path), str(rank)]
            host = hosts[rank // work_.RANKS_PER_HOST]
            commands.append(host.command([*worker, str(Path(folder, "store")), str(result_path)]))
        watch(commands, logs, _told, _SILENCE_S + 2 * work.longest_s(rate_mbit), INTERFACE)
        result = json.loads(result_path.read_text(encoding="utf-8"))
        link = _link(hosts, rate_mbit)
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    return {**result, "link": link, "machine": machine}


def _with_context(
    work: Work, found: Mapping[str, Any], left_out: Mapping[str, str], context: Mapping[str, Any]
) -> dict[str, Any]:
    of_setting = {**figures(found, left_out, work.num_modules), **context}
    # A rank sends as much of an all-reduce of two as the tensor holds.
    sent_bytes = work.num_modules * of_setting["module_numel"] * 4
    of_setting["link"] = {**context["link"], "payload_mbit": sent_bytes * 8 / of_setting["ar_s"] / 1e6}
    return of_setting


def _link(hosts: tuple[Host, Host], rate_mbit: float) -> dict[str, Any]:
    return {
        "rate_mbit": rate_mbit,
        "congestion_control": CONGESTION_CONTROL,
        "sent": [host.counters() for host in hosts],
    }


def _told(event: Mapping[str, Any]) -> None:
    if "attach" in event:
        print(f"attach {event['attach']}", file=sys.stderr)
    elif "round" in event:
        what = f"round {event['round']} of {event['of']}" if event["round"] else "warm-up"
        print(f"{event['setting']}: {what}", file=sys.stderr)
