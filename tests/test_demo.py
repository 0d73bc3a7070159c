"""The parts of the demonstration: text, measurements, the watch over its workers, and what it reports."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from demo_run import show
from demo_run.data import Batches, library_folder, read_corpus
from demo_run.launch import WorkerError, watch
from demo_run.measure import Digest, StockProbe, largest_difference
from demo_run.model import ByteTransformer
from demo_run.page import CALIBRATION, profile_of, run_path, write_page
from demo_run.report import merge, problems, write_summary
from demo_run.settings import ALONE, STOCK, Settings

from commplan.simulate import costs, simulate
from tests.picture.given import run_like, simulated


class TestText:
    def test_is_python_source_and_no_longer_than_asked(self) -> None:
        corpus = read_corpus(library_folder(), 300_000)
        assert len(corpus) == 300_000
        assert b"import " in corpus

    def test_order_of_names_without_tests_and_packages(self, tmp_path: Path) -> None:
        for name in ("b/one.py", "a.py", "test/x.py", "site-packages/y.py", "c.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        assert read_corpus(tmp_path, 100) == b"a.pyb/one.py"

    def test_no_source_is_an_error_that_names_the_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            read_corpus(tmp_path, 100)

    def test_batches_follow_from_seed_step_and_rank(self) -> None:
        corpus = bytes(range(200))
        batches, again = (Batches(corpus, context=8, batch=3, seed=7) for _ in range(2))
        inputs, targets = batches.get(5, 1)
        assert inputs.shape == targets.shape == (3, 8)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(targets - inputs, torch.ones_like(inputs))
        assert all(torch.equal(one, other) for one, other in zip((inputs, targets), again.get(5, 1), strict=True))
        assert not torch.equal(inputs, batches.get(5, 2)[0])
        assert not torch.equal(inputs, batches.get(6, 1)[0])

    def test_every_window_of_the_text_can_be_drawn(self) -> None:
        batches = Batches(bytes(range(12)), context=8, batch=200, seed=0)
        assert set(batches.get(0, 0)[0][:, 0].tolist()) == {0, 1, 2, 3}


def test_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(dim=16, num_blocks=2, num_heads=2, context=6)
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, arguments, output: seen.append(output.detach()))
    inputs = torch.tensor([[1, 2, 3, 4, 5, 6]])
    model(inputs, inputs)
    inputs[0, 4] = 9
    model(inputs, inputs)
    assert torch.equal(seen[0][:, :4], seen[1][:, :4])
    assert not torch.equal(seen[0][:, 4], seen[1][:, 4])


class TestMeasure:
    def test_largest_difference(self) -> None:
        one, other = torch.zeros(3), torch.tensor([0.0, -2.0, 1.0])
        assert largest_difference([one, None, torch.empty(0)], [one, None, torch.empty(0)]) == 0.0
        assert largest_difference([one], [other]) == 2.0
        assert largest_difference([one], [None]) == float("inf")
        assert largest_difference([one], [torch.full((3,), float("nan"))]) == float("inf")

    def test_digest_is_of_type_shape_and_bytes(self) -> None:
        def digest(*tensors: torch.Tensor | None) -> str:
            made = Digest()
            made.add(tensors)
            return made.hex()

        ones = torch.ones(2, 2)
        assert digest(ones) == digest(ones.clone()) == digest(torch.ones(2, 4)[:, ::2])
        assert len({digest(t) for t in (ones, ones.flatten(), ones.double(), -ones, None)} | {digest(ones, None)}) == 6

    def test_probe_counts_inputs_while_they_live_and_restores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("reduce_scatter_single", "all_reduce"):
            monkeypatch.setattr(dist, name, lambda *args, **kwargs: time.sleep(0.002), raising=False)
        before = (dist.reduce_scatter_single, dist.all_reduce)
        with StockProbe() as probe:
            for size in (100, 30, 50):
                buffers = {"input": torch.zeros(size), "output": torch.zeros(size // 2)}
                dist.reduce_scatter_single(**buffers)
                dist.all_reduce(buffers["output"])
                if size == 30:
                    kept = buffers["input"]
                del buffers
        assert (dist.reduce_scatter_single, dist.all_reduce) == before
        assert kept.numel() == 30
        sample = probe.sample(1.0)
        assert sample.peak_bytes == 4 * max(100 + 50, 30 + 15, 30 + 50 + 25)
        assert sample.hidden_s == 0.0
        assert sample.exposed_s == sum(exposed for hidden, exposed in sample.lanes.values())
        assert all(exposed > 0 for hidden, exposed in sample.lanes.values())


class TestWatch:
    def run(self, tmp_path: Path, *programs: str, silence_s: float = 30.0) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        watch([[sys.executable, "-c", program] for program in programs], tmp_path, events.append, silence_s)
        return events

    def test_hears_rank_0_to_the_end(self, tmp_path: Path) -> None:
        talk = 'import json\nfor step in range(3): print(json.dumps({"step": step}))\nprint("noise")'
        assert self.run(tmp_path, talk, "print('{}')") == [{"step": 0}, {"step": 1}, {"step": 2}]

    def test_a_worker_that_fails_ends_the_others(self, tmp_path: Path) -> None:
        stay = f"import os, time; open(r'{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(600)"
        fail = f"import os, time\nwhile not os.path.exists(r'{tmp_path}/pid'): time.sleep(0.01)\nraise ValueError('no luck')"
        with pytest.raises(WorkerError, match=r"worker 1 failed \(ValueError: no luck\); see .*rank1\.log") as caught:
            self.run(tmp_path, stay, fail)
        assert "\n" not in str(caught.value)
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), 0)

    def test_a_worker_that_is_killed_is_named(self, tmp_path: Path) -> None:
        stop = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
        with pytest.raises(WorkerError, match="worker 2 was killed by signal 9"):
            self.run(tmp_path, "import time; time.sleep(600)", "import time; time.sleep(600)", stop)

    def test_silence_ends_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(WorkerError, match="no step for 1 s"):
            self.run(tmp_path, "import time; time.sleep(600)", silence_s=1.0)


def record(name: str, **changes: Any) -> dict[str, Any]:
    base = {
        "schedule": name,
        "losses": [5.0, 4.0],
        "max_grad_diff": 0.0,
        "gradients": "aa",
        "parameters": "bb",
        "backward_s": 0.2,
        "hidden_s": 0.01,
        "exposed_s": 0.02,
        "lanes": {"shard": [0.01, 0.02]},
        "peak_bytes": 1000,
        "declared_peak_bytes": 1000,
    }
    return {**base, **changes}


class TestReport:
    def test_one_row_a_run_over_all_ranks(self) -> None:
        by_rank = [
            [record(STOCK, declared_peak_bytes=None), record("a", losses=[5.0, 3.0], peak_bytes=900)],
            [record(STOCK, declared_peak_bytes=None, gradients="cc"), record("a", gradients="cc", max_grad_diff=0.5)],
        ]
        stock, row = merge(by_rank)
        assert (stock["schedule"], stock["declared_peak_bytes"]) == (STOCK, None)
        assert (row["loss_first"], row["loss_last"], row["max_grad_diff"], row["peak_bytes"]) == (5.0, 3.5, 0.5, 1000)
        assert row["grad_sha256"] == stock["grad_sha256"] == hashlib.sha256(b"aacc").hexdigest()
        assert row["lanes"] == {"shard": {"hidden_s": 0.01, "exposed_s": 0.02}}

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, ""),
            ({"max_grad_diff": 1e-7}, "a: gradients differ from stock FSDP2 by 1e-07"),
            ({"max_grad_diff": float("inf")}, "a missing or non-finite one"),
            ({"gradients": "ab"}, "a: gradients are not bit-equal"),
            ({"parameters": "ab"}, "a: parameters at the end are not bit-equal"),
            ({"peak_bytes": 1001}, "a: held 1,001 bytes of communication buffers, its plan declares 1,000"),
        ],
    )
    def test_broken_promises_are_told(self, changes: dict[str, Any], expected: str) -> None:
        found = problems(merge([[record(STOCK, declared_peak_bytes=None), record("a", **changes)]]))
        assert len(found) == bool(expected)
        assert expected in "".join(found)

    def test_summary_is_json_with_what_is_promised(self, tmp_path: Path) -> None:
        rows = merge([[record(STOCK, declared_peak_bytes=None), record("a", max_grad_diff=float("nan"))]])
        write_summary(tmp_path / "summary.json", Settings(), rows, [], 0.0)
        runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
        assert [run["schedule"] for run in runs] == [STOCK, "a"]
        promised = {
            *("schedule", "loss_first", "loss_last", "max_grad_diff", "grad_sha256", "param_sha256"),
            *("backward_median_s", "hidden_s", "exposed_s", "peak_bytes", "declared_peak_bytes"),
        }
        assert all(promised <= set(run) for run in runs)
        assert runs[1]["max_grad_diff"] is None

    def test_tables_name_every_run(self) -> None:
        rows = merge([[record(STOCK, declared_peak_bytes=None), record("a"), record(ALONE, lanes={}, losses=[])]])
        console = Console(width=132, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with console.file:
            console.print(show.training_table(rows[:2]), show.emulated_table(rows))
        text = console.export_text()
        assert text.count(STOCK) == 2
        assert "0.0" in text
        assert ALONE in text


class TestPage:
    def leave(self, folder: Path, *schedules: str, times: float) -> Settings:
        for name in schedules:
            for rank in range(4):
                run_path(folder, name, rank).write_text(run_like(simulated(name), rank, times).to_json())
        return Settings(schedules=schedules)

    def panels(self, path: Path) -> list[int]:
        """Whether each was measured."""
        (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
        return [panel["measured"] for panel in json.loads(text)["panels"]]

    def test_what_ran_beside_what_is_predicted_from_collectives_that_ran_alone(self, tmp_path: Path) -> None:
        settings = self.leave(tmp_path, CALIBRATION, "pipelined_allreduce", times=2.0)
        assert write_page(tmp_path / "report.html", tmp_path, settings, alone_s=0.12)
        assert self.panels(tmp_path / "report.html") == [0, 1, 1, 1, 1] * 2
        runs = [run_like(simulated(CALIBRATION), rank, 2.0) for rank in range(4)]
        profile = profile_of(runs, alone_s=0.12)
        plan = runs[0].report.plan
        assert plan is not None
        backward_s = simulate(plan, costs(plan, profile)).duration_s
        # But for issuing and applying, which the profile leaves out.
        assert backward_s == pytest.approx(2 * (6 * (0.010 + 0.004 + 0.008)))

    def test_without_compute_alone_or_what_is_calibrated_with_runs_are_shown_by_themselves(self, tmp_path: Path) -> None:
        settings = self.leave(tmp_path, "pipelined_allreduce", times=2.0)
        assert not write_page(tmp_path / "report.html", tmp_path, settings, alone_s=0.12)
        assert self.panels(tmp_path / "report.html") == [1] * 4
        settings = self.leave(tmp_path, CALIBRATION, times=2.0)
        assert not write_page(tmp_path / "report.html", tmp_path, settings, alone_s=None)


def test_settings_round_trip(tmp_path: Path) -> None:
    settings = Settings(schedules=("a", "b"), steps=3)
    settings.save(tmp_path / "s.json")
    assert Settings.load(tmp_path / "s.json") == settings
