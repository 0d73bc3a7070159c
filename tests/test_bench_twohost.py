"""tools/bench twohost: its limit, its table, what it leaves behind, and a small run where namespaces can be made.

Nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commplan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from bench_run import __main__ as bench
from bench_run import twohost, twohost_figures, twohost_network
from bench_run import twohost_work as work_
from bench_run.refusal import RefusedError
from bench_run.twohost_figures import Alone
from bench_run.twohost_measured import FUSED_TOLERANCE, WIRE_TOLERANCE, Reference, relative_difference, tolerance
from bench_run.twohost_network import two_hosts
from bench_run.twohost_work import Work, best_schedules, slowest_s

ROOT = Path(__file__).resolve().parents[1]


def pipeline_s(num_modules: int, stages_s: Sequence[float]) -> float:
    """When the last module leaves the last of these stages, each of which has one module at a time, as early as it can."""
    left_s = [0.0] * num_modules
    for stage_s in stages_s:
        free_s = 0.0
        for n in range(num_modules):
            free_s = max(free_s, left_s[n]) + stage_s
            left_s[n] = free_s
    return left_s[-1]


class TestLimit:
    def test_of_compute_and_of_the_link(self) -> None:
        assert Alone(2.16, 0.12, 1.2, 0.06, 12).limit_s == pytest.approx(0.005 + 2.16 + 0.01 + 0.1)
        assert Alone(0.6, 0.12, 2.16, 0.06, 12).limit_s == pytest.approx(0.005 + 0.05 + 0.01 + 2.16)

    @given(st.integers(1, 9), *[st.floats(0.001, 1.0)] * 4)
    def test_is_a_pipeline_without_a_gap(
        self, num_modules: int, ag_s: float, compute_s: float, rs_s: float, ar_s: float
    ) -> None:
        stages_s = (ag_s, compute_s, rs_s, ar_s)
        limit_s = Alone(*(num_modules * stage_s for stage_s in (compute_s, rs_s, ar_s, ag_s)), num_modules).limit_s
        reached_s = pipeline_s(num_modules, stages_s)
        assert limit_s <= reached_s * (1 + 1e-9)
        if max(stages_s) in (compute_s, ar_s):
            assert limit_s == pytest.approx(reached_s)


def saw(times_s: dict[str, list[list[float]]], **seen: dict[str, Any]) -> dict[str, Any]:
    """What workers report of one setting; four ranks alike but for times."""
    trace = {"begin": 0.0, "end": 100.0, "ops": {"RS_0": [0, 0, 10], "AR_0": [0, 10, 50]}}
    trace["stats"] = {"commplan/compute_wait_s": 0.02}
    default = {"difference": 0.0, "tolerance": 0.0, "peak_bytes": 1 << 20, "trace": trace}
    return {
        "times_s": times_s,
        "seen": {name: [{**default, **seen.get(name, {})}] * 4 for name in times_s},
        "module_numel": 1_000_000,
    }


ALONE_S = {
    work_.NATIVE: [[0.5, 0.7], [0.4, 0.9]],
    work_.NATIVE_ASYNC: [[0.6, 0.6], [0.6, 0.6]],
    work_.COMPUTE: [[0.08, 0.08], [0.08, 0.08]],
    work_.REDUCE_SCATTERS: [[0.01, 0.01], [0.01, 0.01]],
    work_.ALL_REDUCES: [[0.2, 0.2], [0.2, 0.2]],
    work_.ALL_GATHERS: [[0.01, 0.01], [0.01, 0.01]],
}


def figures(**schedules: dict[str, Any]) -> dict[str, Any]:
    times = {name: row.pop("times_s", [[0.25, 0.35], [0.3, 0.2]]) for name, row in schedules.items()}
    found = twohost_figures.figures(saw({**ALONE_S, **times}, **schedules), {"odd": "UnsupportedError: no"}, 2)
    context = {"machine": {"cores": 2}, "link": {"rate_mbit": 400.0, "payload_mbit": 370.0}, "rounds": 2}
    return {"180": {**found, **context}}


class TestFigures:
    def test_medians_are_of_the_slowest_rank(self) -> None:
        assert slowest_s(ALONE_S)[work_.NATIVE] == [0.5, 0.9]
        found = figures(a={}, b={"times_s": [[0.2, 0.3], [0.25, 0.25]]})["180"]
        assert found["native_s"] == pytest.approx(0.7)
        assert found["limit_s"] == pytest.approx(0.005 + 0.04 + 0.005 + 0.2)
        assert (found["best_schedule"], found["best_s"]) == ("b", pytest.approx(0.275))
        assert found["ratio_native"] == pytest.approx(0.7 / 0.275)
        assert found["ratio_limit"] == pytest.approx(0.275 / 0.25)
        row = found["schedules"]["a"]
        assert (row["median_s"], row["samples_s"]) == (pytest.approx(0.325), [0.3, 0.35])
        assert (row["ratio_native"], row["ratio_limit"]) == (pytest.approx(0.7 / 0.325), pytest.approx(0.325 / 0.25))
        assert (row["peak_bytes"], row["gradients"], row["note"]) == (1 << 20, "equal", "")

    def test_stretch_is_against_what_each_takes_alone(self) -> None:
        stretch = figures(a={})["180"]["stretch"]
        assert stretch == {"compute": pytest.approx(1.0), "rs": pytest.approx(1.0), "ar": pytest.approx(0.2)}

    def test_schedules_are_ranked_by_their_medians(self) -> None:
        times = {**ALONE_S, "slow": [[3.0, 1.0, 2.0]], "fast": [[1.0, 9.0, 1.1]], "middle": [[1.5, 1.5, 1.5]]}
        assert best_schedules(times) == ["fast", "middle", "slow"]

    def test_gradients_beyond_what_a_schedule_may_change_are_a_problem(self) -> None:
        found = figures(a={"difference": 1e-9}, b={"difference": 1e-3, "tolerance": 2e-3}, c={"tolerance": 2e-3})
        rows = found["180"]["schedules"]
        assert [rows[name]["gradients"] for name in "abc"] == [1e-9, 1e-3, "equal"]
        problems = twohost_figures.problems(found)
        assert len(problems) == 1
        assert problems[0].startswith("180: a: gradients differ by 1.0e-09")
        assert twohost_figures.problems(figures(b={"difference": 1e-3, "tolerance": 2e-3})) == []

    def test_table_names_everything(self) -> None:
        found = figures(a={}, b={"difference": 1e-3, "tolerance": 2e-3})
        shown = "\n".join(twohost_figures.shown(found))
        for words in (
            "400 Mbit/s",
            "180 ms",
            "stock FSDP2",
            "async",
            "the limit",
            "1.0 MiB",
            "equal",
            "1.0e-03",
            "left out: odd",
        ):
            assert words in shown
        row = next(line for line in shown.splitlines() if line.strip().startswith("a "))
        assert row.split()[1:6] == ["0.325", "s", "1.300", "2.15", "times"]
        assert "cores" not in shown

    def test_real_compute_says_what_it_suffers_from(self) -> None:
        shown = "\n".join(twohost_figures.shown({"real": figures(a={})["180"]}))
        assert "share 2 cores" in shown
        assert "in a compute took 1.00 times as long as alone" in shown

    def test_without_schedules_there_is_no_best(self) -> None:
        assert figures()["180"]["best_schedule"] is None
        assert "stock FSDP2" in "\n".join(twohost_figures.shown(figures()))


class TestGradients:
    def test_zero_only_if_all_bits_are_equal(self) -> None:
        one = torch.tensor([1.0, -4.0])
        assert relative_difference(one, one.clone()) == 0.0
        assert relative_difference(torch.tensor([1.0, -3.0]), one) == 0.25
        assert 0.0 < relative_difference(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) < 1e-300
        for wrong in (float("nan"), float("inf")):
            assert relative_difference(torch.tensor([1.0, wrong]), one) == float("inf")

    def test_the_first_are_what_later_ones_are_compared_with(self) -> None:
        reference = Reference()
        gradients = [torch.ones(2), torch.full((2,), 2.0)]
        assert reference.difference(gradients) == 0.0
        gradients[1][0] = 3.0
        assert reference.difference(gradients) == 0.5

    @pytest.mark.parametrize(
        ("attributes", "expected"),
        [
            ("", 0.0),
            ("fuse: {modules: 1}", 0.0),
            ("fuse: {modules: 2}", FUSED_TOLERANCE),
            ("chunks: 4", FUSED_TOLERANCE),
            ("dtype: bf16", WIRE_TOLERANCE),
            ("dtype: fp32", 0.0),
        ],
    )
    def test_tolerance_follows_from_the_plan(self, attributes: str, expected: float) -> None:
        others = f", {attributes}" if attributes else ""
        hook = f"[RS_n: {{after: compute_n}}, AR_n: {{after: RS_n{others}}}]"
        text = f"version: 1\nname: one\npost_backward: {hook}\nroot: [apply_n: {{after: AR_n}}]\n"
        assert tolerance(commplan.compile(text, 4)) == expected


class TestOptions:
    def parsed(self, *arguments: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        twohost.add_options(parser)
        return parser.parse_args(arguments)

    def test_real_compute_comes_last(self) -> None:
        assert self.parsed("--compute", "real,50,50.0,2.5").compute == ("50", "2.5", "real")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--schedules", "blocking,nothing"), "no schedule nothing"),
            (("--compute", "-1"), "milliseconds, at most"),
            (("--rate", "0.5"), "between 1 and"),
            (("--modules", "0"), "at least 1"),
        ],
    )
    def test_wrong_values_are_refused(self, arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            self.parsed(*arguments)
        assert said in capsys.readouterr().err

    def test_work_survives_its_way_to_the_workers(self, tmp_path: Path) -> None:
        work = Work(("a", "b"), ("180", "real"), rounds=3)
        work.save(tmp_path / "work.json")
        assert Work.load(tmp_path / "work.json") == work


class TestRefusal:
    def refusal(self, capsys: pytest.CaptureFixture[str]) -> str:
        assert bench.main(["twohost", "--rounds", "1"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        for needed in ("tools/bench twohost: ", "root", "`ip`", "`tc`", "iproute2"):
            assert needed in said.err
        return said.err

    def test_without_root(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "missing here: root" in self.refusal(capsys)

    def test_without_programs(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", "")
        assert "`nsenter` (Debian: util-linux), `tc` (Debian: iproute2)" in self.refusal(capsys)

    def test_where_the_kernel_says_no(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        for program in ("ip", "tc", "nsenter", "unshare"):
            (tmp_path / program).write_text(f"#!/bin/sh\necho {program}: Operation not permitted >&2\nexit 1\n")
            (tmp_path / program).chmod(0o755)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert "can't be made: unshare: Operation not permitted" in self.refusal(capsys)


def of_each_process(file: str, read: Callable[[Path], str]) -> dict[str, str]:
    """Process -> what `read` finds in its `file`; those that end meanwhile are left out."""
    found = {}
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            found[path.parts[2]] = read(path)
    return found


def namespaces() -> set[str]:
    """The network namespaces that processes are in."""
    return set(of_each_process("ns/net", os.readlink).values())


def of_processes(pids: Sequence[int]) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}


def own_children() -> set[str]:
    """The processes that this one has started and that are not gone."""
    parents = of_each_process("stat", lambda path: path.read_text().rpartition(")")[2].split()[1])
    return {pid for pid, parent in parents.items() if parent == str(os.getpid())}


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """Skips where there are no namespaces and links to be had."""
    try:
        with two_hosts(400):
            pass
    except RefusedError as refused:
        pytest.skip(str(refused))
    return


HOLD = """
import json, os, sys
from pathlib import Path
from bench_run.twohost_network import INTERFACE, ended_by_signals, two_hosts
from demo_run.launch import watch

worker = "import json, os, time; from demo_run.launch import leave_with_parent; leave_with_parent(); "
worker += "print(json.dumps({'pid': os.getpid()}), flush=True); time.sleep(600)"
with ended_by_signals(), two_hosts(400) as hosts:
    commands = [host.command([sys.executable, "-c", worker]) for host in hosts]

    def told(event):
        print(json.dumps([event["pid"], *(host.pid for host in hosts)]), flush=True)

    watch(commands, Path(sys.argv[1]), told, 600.0, INTERFACE)
"""


@pytest.mark.usefixtures("network")
class TestNetwork:
    def test_hosts_reach_one_another_over_a_shaped_link_and_themselves_beside_it(self) -> None:
        own = of_processes([os.getpid()])
        with two_hosts(100) as hosts:
            inside = of_processes([host.pid for host in hosts])
            assert len(inside) == 2
            assert not inside & own
            assert "rate 100Mbit" in hosts[0].run(["tc", "qdisc", "show", "dev", twohost_network.INTERFACE])
            before = hosts[0].counters()["bytes"]
            talk = (
                "import socket, sys; server = socket.create_server((sys.argv[1], 7000)); print('ready', flush=True); "
                "peer = server.accept()[0]; print(sum(iter(lambda: len(peer.recv(1 << 16)), 0)))"
            )
            call = "import socket, sys; socket.create_connection((sys.argv[1], 7000)).sendall(bytes(1 << 20))"
            sent = {}
            for host in hosts:
                server = subprocess.Popen(
                    host.command([sys.executable, "-c", talk, host.address]), stdout=subprocess.PIPE, text=True
                )
                with server:
                    assert server.stdout is not None
                    assert server.stdout.readline() == "ready\n"
                    hosts[0].run([sys.executable, "-c", call, host.address])
                    assert server.stdout.read() == f"{1 << 20}\n"
                sent[host], before = hosts[0].counters()["bytes"] - before, hosts[0].counters()["bytes"]
            assert sent[hosts[0]] < 1000
            assert 1 << 20 < sent[hosts[1]] < 1.1 * (1 << 20)
        assert not inside & namespaces()

    def test_nothing_is_left_after_an_exception(self) -> None:
        inside: set[str] = set()

        def fail() -> None:
            with two_hosts(400) as hosts:
                inside.update(of_processes([host.pid for host in hosts]))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert len(inside) == 2
        assert not inside & namespaces()

    def test_nothing_is_left_where_a_command_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = own_children()
        monkeypatch.setattr(twohost_network, "INTERFACE", "longer-than-names-may-be")
        with pytest.raises(RefusedError, match=r"`nsenter .* ip link add .*` failed"), two_hosts(400):
            pass
        assert own_children() == before

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
    def test_nothing_is_left_after_a_signal(self, number: signal.Signals, tmp_path: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), str(ROOT)])}
        command = [sys.executable, "-c", HOLD, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as holder:
            assert holder.stdout is not None
            pids = json.loads(holder.stdout.readline())
            inside = of_processes(pids)
            assert len(inside) == 2
            holder.send_signal(number)
            holder.wait(timeout=30)
        left_s = time.monotonic() + 30
        # Of one that is killed, the others learn by a closed pipe.
        while inside & namespaces() and time.monotonic() < left_s:
            time.sleep(0.02)
        assert not inside & namespaces()
        expected = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9, signal.SIGINT: -2}
        assert holder.returncode in (expected[number], 130)


@pytest.mark.usefixtures("network")
def test_a_small_run(tmp_path: Path) -> None:
    before = own_children()
    work = Work(("blocking", "overlapped_allreduce"), ("3", "1"), num_modules=2, dim=512, rounds=1)
    found = twohost.measure_work(work, 2000.0, tmp_path)
    assert own_children() == before
    assert list(found) == ["3", "1"]
    json.dumps(found, allow_nan=False)
    for setting, of_setting in found.items():
        assert of_setting["compute_s"] > 2 * float(setting) / 1e3
        assert set(of_setting["schedules"]) == {"blocking", "overlapped_allreduce"}
        assert of_setting["ratio_limit"] == pytest.approx(of_setting["best_s"] / of_setting["limit_s"])
        for row in of_setting["schedules"].values():
            assert (row["gradients"], row["note"]) == ("equal", "")
            assert row["peak_bytes"] > 0
            assert len(row["traces"]) == 4
            assert {"RS_0", "RS_1", "AR_0", "AR_1"} == set(row["traces"][0]["ops"])
            assert all(len(trace["compute"]) == 2 for trace in row["traces"])
    assert twohost_figures.problems(found) == []
    assert "blocking" in "\n".join(twohost_figures.shown(found))
    # Both settings, a warm-up and a round of five in which all-reduces run: only these cross the link, not the shards.
    payload = 2 * 2 * 5 * work.num_modules * of_setting["module_numel"] * 4
    for sent in found["3"]["link"]["sent"]:
        assert payload < sent["bytes"] < 1.2 * payload
        assert sent["drops"] == 0
