"""The checks, as a rank runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commplan
from commplan.execute.happens_before import check as judge
from commplan.execute.lanes import Task
from commplan.execute.streams import DeviceHooks, StreamLanes
from commplan.execute.trace_log import RecordedLanes, TracedModule, TraceLog
from commplan.fsdp2 import Options
from commplan.fsdp2.torch_operators import AccessMode
from commplan.language import library
from commplan.ops import Kind
from commplan.plan.model import OpStep
from commplan.sight.report import BackwardReport
from device_check_run.platform import Platform
from device_check_run.rows import Row

TIMEOUT_S = 120.0
NUM_BLOCKS = 6
WIDTH = 256
NUM_TIMED = 10

# Of the overlap check: ops, and the side of the square matrices that keep a stream busy.
NUM_PACED = 8
SIDE = {"recording": 8}
SIDE_OF_DEVICE = 2048
NUM_PRODUCTS = 8


def rounds_otherwise(plan: commplan.Plan) -> bool:
    """Whether something is fused, chunked or sent in another dtype, so that sums need not have the same bits."""
    ops = (step for step in plan.steps if isinstance(step, OpStep) and step.kind is not Kind.ALL_GATHER)
    return any(step.dtype is not None or len(step.op.members) > 1 or step.op.pieces > 1 for step in ops)


class Model(nn.Module):
    """Blocks of two linear layers, and a head in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all of it."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Checks:
    """The checks of one rank; each yields rows, the same ones on every rank."""

    def __init__(self, platform: Platform, rank: int) -> None:
        self.platform, self.rank = platform, rank
        self.device = platform.device(rank)
        self.module = platform.module()
        size = platform.num_ranks
        shape = (2, size // 2) if size >= 4 else (1, size)
        self.mesh = init_device_mesh(platform.type, shape, mesh_dim_names=("replicate", "shard"))

    def run(self) -> Iterator[Row]:
        """All of them; one that raises is a row."""
        for check in (self.parity, self.order, self.overlap, self.memory, self.host_cost):
            try:
                yield from check()
            except Exception as error:  # noqa: BLE001 - told in the table
                yield Row(check.__name__, "", "failed", f"{type(error).__name__}: {error}")

    def parity(self) -> Iterator[Row]:
        """Gradients under every schedule against stock FSDP2's, bit for bit; two microbatches the second time."""
        for bf16 in (False, True):
            expected = self._gradients(self._build(bf16))
            for name in library.names():
                model = self._build(bf16)
                with commplan.attach(model, name, options=self._options(self._lanes)) as attachment:
                    off = self._differences(self._gradients(model), expected)
                subject = f"{name}{', bf16' if bf16 else ''}"
                if off and rounds_otherwise(attachment.plan):
                    yield Row("parity", subject, "measured", f"rounds otherwise: {'; '.join(off)}")
                    continue
                yield Row("parity", subject, "wrong" if off else "right", "; ".join(off) or "bit-equal to stock FSDP2")

    def order(self) -> Iterator[Row]:
        """The log of a real run, judged."""
        for name in library.names():
            log = TraceLog()
            traced = TracedModule(self.module, self.device, log)
            model = self._build(bf16=True)
            made: list[RecordedLanes] = []

            def lanes(device: torch.device, timeout_s: float, traced: Any = traced, made: Any = made) -> RecordedLanes:
                made.append(RecordedLanes(traced, timeout_s, AccessMode))
                return made[-1]

            with commplan.attach(model, name, options=self._options(lanes)):
                for _ in range(3):
                    self._backward(model)
                    with made[-1].watching():
                        for p in model.parameters():
                            if p.grad is not None:
                                p.grad.to_local().clone()
                problems = judge(list(log.entries))
                num_entries = len(log.entries)
            detail = "; ".join(problems[:2]) or f"{num_entries} entries in order"
            yield Row("order", name, "wrong" if problems else "right", detail, {"entries": num_entries})

    def overlap(self) -> Iterator[Row]:
        """Products on two lanes beside products of compute: time on the device that they share."""
        side = SIDE.get(self.platform.kind, SIDE_OF_DEVICE)
        buffers = [[torch.ones(side, side, device=self.device) / side for _ in range(3)] for _ in range(3)]

        def work(at: int) -> None:
            a, b, out = buffers[at]
            for _ in range(NUM_PRODUCTS):
                torch.mm(a, b, out=out)

        def paced(is_beside: bool) -> tuple[float, float, float]:
            lanes = self._lanes(self.device, TIMEOUT_S)
            for lane in ("shard", "replicate"):
                lanes.open(lane, "high")
            self.platform.synchronize()
            with lanes.compute():
                for i in range(NUM_PACED):
                    at = i % 2
                    task = Task(f"op_{i}", "", "no group", lambda at=at: work(at + 1), lambda: None)
                    token = lanes.submit(("shard", "replicate")[at], task, [])
                    if not is_beside:
                        lanes.wait([token])
                    work(0)
                lanes.drain()
                ops, waits = lanes.take_intervals()
            report = BackwardReport(0.0, 0.0, tuple(ops), tuple(waits), 0, 0)
            span_s = max(i.end_s for i in (*ops, *waits)) - min(i.begin_s for i in ops)
            lanes.close()
            return report.hidden_s(), report.exposed_s(), span_s

        paced(is_beside=True)  # the first use of a stream is slow
        figures = {}
        for name, is_beside in (("beside", True), ("one after another", False)):
            hidden_s, exposed_s, span_s = paced(is_beside)
            figures |= {f"{name}: hidden_s": hidden_s, f"{name}: exposed_s": exposed_s, f"{name}: span_s": span_s}
        is_hidden = figures["beside: hidden_s"] > figures["one after another: hidden_s"]
        detail = f"hidden {figures['beside: hidden_s'] * 1e3:.2f} ms, of which serial has "
        detail += f"{figures['one after another: hidden_s'] * 1e3:.2f} ms"
        judged = "measured" if self.platform.kind == "recording" else "right" if is_hidden else "wrong"
        yield Row("overlap", "paced ops on two lanes", judged, detail, figures)
        model = self._build(bf16=False)
        with commplan.attach(model, "pipelined_allreduce", options=self._options(self._lanes)) as attachment:
            for _ in range(3):
                self._backward(model)
            report = attachment.last_backward
            assert report is not None
            found = {"hidden_s": report.hidden_s(), "exposed_s": report.exposed_s()}
        detail = f"hidden {found['hidden_s'] * 1e3:.2f} ms, exposed {found['exposed_s'] * 1e3:.2f} ms"
        yield Row("overlap", "collectives of pipelined_allreduce", "measured", detail, found)

    def memory(self) -> Iterator[Row]:
        """Communication memory against what plans declare, and the allocator's peak against stock FSDP2's."""
        stock = self._allocated(self._build(bf16=False))
        for name in library.names():
            model = self._build(bf16=False)
            with commplan.attach(model, name, options=self._options(self._lanes)) as attachment:
                allocated = self._allocated(model)
                report = attachment.last_backward
                assert report is not None
                figures = {
                    "peak_bytes": report.peak_bytes,
                    "declared_peak_bytes": report.declared_peak_bytes,
                    "allocator_peak_bytes": allocated,
                    "allocator_peak_bytes of stock": stock,
                }
            is_within = report.peak_bytes <= report.declared_peak_bytes
            detail = f"{report.peak_bytes} of {report.declared_peak_bytes} bytes; allocator {allocated}, stock {stock}"
            yield Row("memory", name, "right" if is_within else "wrong", detail, figures)

    def host_cost(self) -> Iterator[Row]:
        """Time that the host spends in a backward, for each module, without waiting for the device."""
        stock_s = self._host_s(self._build(bf16=False))
        yield Row("host cost", "stock FSDP2", "measured", f"{stock_s * 1e6:.0f} us a module", {"host_s": stock_s})
        for name in ("fsdp2_native", "pipelined_allreduce"):
            model = self._build(bf16=False)
            with commplan.attach(model, name, options=self._options(self._lanes)):
                host_s = self._host_s(model)
            detail = f"{host_s * 1e6:.0f} us a module, {host_s / stock_s:.2f} of stock"
            yield Row("host cost", name, "measured", detail, {"host_s": host_s})

    def _lanes(self, device: torch.device, timeout_s: float) -> StreamLanes:
        return StreamLanes(device, timeout_s, DeviceHooks(module=self.module))

    def _options(self, make_lanes: Callable[[torch.device, float], Any]) -> Options:
        return Options(timeout_s=TIMEOUT_S, make_lanes=make_lanes)

    def _build(self, bf16: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Model().to(self.device)
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        return fully_shard(model, mesh=self.mesh, mp_policy=policy)

    def _backward(self, model: nn.Module, batch: int = 0) -> None:
        generator = torch.Generator().manual_seed(100 * self.rank + batch)
        x = torch.randn(4, WIDTH, generator=generator).to(self.device)
        model(x.requires_grad_()).float().pow(2).mean().backward()

    def _gradients(self, model: nn.Module) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for flags in ([True], [False, True]):
            for batch, all_reduce in enumerate(flags):
                model.set_requires_all_reduce(all_reduce)  # type: ignore[operator]
                self._backward(model, batch)
            found.extend(p.grad.to_local().clone() for p in model.parameters() if p.grad is not None)
            model.zero_grad()
        self.platform.synchronize()
        return found

    def _differences(self, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[str]:
        if len(mine) != len(theirs):
            return [f"{len(mine)} gradients, stock FSDP2 has {len(theirs)}"]
        return [
            f"gradient {i} is off by {(a.float() - b.float()).abs().max().item():g}"
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True))
            if not torch.equal(a, b)
        ][:3]

    def _allocated(self, model: nn.Module) -> int:
        self._backward(model)
        self.platform.synchronize()
        self.platform.peak_bytes(restart=True)
        self._backward(model)
        self.platform.synchronize()
        return self.platform.peak_bytes()

    def _host_s(self, model: nn.Module) -> float:
        """Median host time of a backward, by module."""
        times = []
        for _ in range(NUM_TIMED):
            x = torch.ones(4, WIDTH, device=self.device, requires_grad=True)
            loss = model(x).sum()
            self.platform.synchronize()
            dist.barrier()
            begin_s = time.perf_counter()
            loss.backward()
            times.append(time.perf_counter() - begin_s)
            self.platform.synchronize()
        return sorted(times)[NUM_TIMED // 2] / (NUM_BLOCKS + 1)
