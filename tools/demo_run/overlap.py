"""The picture in the README: `python -m demo_run.overlap [OUT.svg]`, or `tools/draw_overlap`.

Four processes run the same backward with stock FSDP2 and with a schedule.  The collectives are real (gloo); compute is
emulated: each module's backward sleeps, so that two cores can show overlap.  Rank 0 draws its median backward of each.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing
from bench_run.emulated import SleepingLinear
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import commplan
from demo_run.measure import StockProbe
from demo_run.picture import WAIT, Bar, Timeline, draw

SCHEDULE: Final = "pipelined_allreduce"
MESH: Final = (2, 2)
NUM_MODULES: Final = 6
DIM: Final = 1024
SLEEP_S: Final = 0.040
NUM_BACKWARDS: Final = 15
DEFAULT_OUT: Final = Path(__file__).resolve().parents[2] / "docs" / "overlap.svg"

Span = tuple[str, str, str, float, float]
"""Lane, kind, label, begin and end in `time.perf_counter` seconds."""


class _TimedProbe(StockProbe):
    """Keeps when each collective of stock FSDP2 ran: (lane, begin, end)."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, float, float]] = []

    def _timed(self, lane: str, collective: Any, *args: Any, **kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return collective(*args, **kwargs)
        finally:
            self.ran.append((lane, begin_s, time.perf_counter()))


def _model(mesh: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(SleepingLinear(DIM) for _ in range(NUM_MODULES)))
    for block in model:
        block.seconds = SLEEP_S
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return model


def _computed(model: nn.Sequential) -> list[Span]:
    """The emulated compute of the last backward; modules are numbered in the order of backward."""
    slept = [block.slept[-1] for block in reversed(model)]
    return [("compute", "compute", str(number), begin, end) for number, (begin, end) in enumerate(slept)]


def _backwards(model: nn.Module, x: torch.Tensor, run: Callable[[torch.Tensor], Timeline]) -> Timeline:
    timelines = []
    for _ in range(NUM_BACKWARDS):
        loss = model(x).square().mean()
        dist.barrier()
        timelines.append(run(loss))
        model.zero_grad()
    return sorted(timelines, key=lambda timeline: timeline.duration_s)[NUM_BACKWARDS // 2]


def _timeline(title: str, begin_s: float, end_s: float, spans: Iterable[Span]) -> Timeline:
    bars = (Bar(lane, kind, label, begin - begin_s, end - begin_s) for lane, kind, label, begin, end in spans)
    return Timeline(title, end_s - begin_s, tuple(bars))


def _run_stock(mesh: DeviceMesh, x: torch.Tensor) -> Timeline:
    model = _model(mesh)

    def run(loss: torch.Tensor) -> Timeline:
        begin_s = time.perf_counter()
        with _TimedProbe() as probe:
            loss.backward()
        end_s = time.perf_counter()
        seen: Counter[str] = Counter()
        spans = _computed(model)
        for lane, begin, end in probe.ran:
            spans.append((lane, lane, str(seen[lane]), begin, end))
            spans.append(("compute", WAIT, "", begin, end))
            seen[lane] += 1
        return _timeline("stock FSDP2 on CPU: every collective blocks", begin_s, end_s, spans)

    return _backwards(model, x, run)


def _run_schedule(mesh: DeviceMesh, x: torch.Tensor) -> Timeline:
    model = _model(mesh)
    with commplan.attach(model, SCHEDULE) as attachment:

        def run(loss: torch.Tensor) -> Timeline:
            begin_s = time.perf_counter()
            loss.backward()
            end_s = time.perf_counter()
            report = attachment.last_backward
            assert report is not None
            spans = _computed(model)
            spans += [(op.lane, op.lane, op.op.partition("_")[2], op.begin_s, op.end_s) for op in report.ops]
            spans += [("compute", WAIT, "", wait.begin_s, wait.end_s) for wait in report.compute_waits]
            return _timeline(f"commplan, {SCHEDULE}", begin_s, end_s, spans)

        return _backwards(model, x, run)


def _worker(rank: int, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), MESH[0] * MESH[1])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=MESH[0] * MESH[1])
    mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard"))
    x = torch.randn(1, DIM, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    timelines = [_run_stock(mesh, x), _run_schedule(mesh, x)]
    if rank == 0:
        Path(out).write_text(draw(timelines, _caption()), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _caption() -> tuple[str, ...]:
    return (
        f"One backward of one rank, the median of {NUM_BACKWARDS}: mesh ({MESH[0]},{MESH[1]}), {NUM_MODULES} modules of "
        f"{DIM * DIM * 4 >> 20} MiB.",
        f"The collectives are real (gloo, one machine). Compute is emulated: {SLEEP_S * 1e3:.0f} ms of sleep a module.",
    )


def main(arguments: Sequence[str]) -> None:
    """Run and draw."""
    out = Path(arguments[0]) if arguments else DEFAULT_OUT
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if Path("/sys/class/net/lo").exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, args=(folder, str(out)), nprocs=MESH[0] * MESH[1])
    print(out)


if __name__ == "__main__":
    main(sys.argv[1:])
