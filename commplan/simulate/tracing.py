"""A simulated backward as a process of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

from commplan.language.modules import Module
from commplan.ops import COMPUTE_LANE, OpId
from commplan.plan.model import BufferKind, OpStep
from commplan.plan.wire import members_of, wire_bytes
from commplan.sight.report import fsdp2_gather
from commplan.sight.trace import IN_FLIGHT, MEMORY, Process, Slice, levels
from commplan.simulate.engine import Ran, Simulated, Stood
from commplan.simulate.predict import limits, memory

PARAMETERS = "gathered parameters"


def process(simulated: Simulated, name: str = "") -> Process:
    """Tracks: compute (where it stands still, what it waits for), and each lane. Arrows: from each op to those that come
    after it. Counters: memory, and bytes of the collectives under way.
    """
    members = members_of(simulated.plan)
    limit_of = dict(zip(map(id, simulated.ops), limits(simulated), strict=True))
    tracks: dict[str, list[Slice]] = {COMPUTE_LANE: []}
    place: dict[OpId, tuple[str, int]] = {}
    spans: dict[str, list[tuple[float, Slice, OpId | None]]] = defaultdict(list)
    for ran in chain(simulated.compute, simulated.ops):
        spans[ran.lane].append((ran.begin_s, _slice(simulated, ran, members, limit_of.get(id(ran), "")), ran.op))
    for stood in simulated.waits:
        spans[COMPUTE_LANE].append((stood.begin_s, Slice(_waited(simulated, stood), stood.begin_s, stood.end_s), None))
    for lane in (COMPUTE_LANE, *(lane.name for lane in simulated.plan.lanes if lane.name != COMPUTE_LANE)):
        ordered = sorted(spans[lane], key=lambda span: (span[0], span[1].end_s))
        tracks[lane] = [one for _, one, _ in ordered]
        place |= {op: (lane, at) for at, (_, _, op) in enumerate(ordered) if op is not None}
    steps = [step for step in simulated.plan.steps if isinstance(step, OpStep)]
    arrows = [(place[op], place[step.op]) for step in steps for op in step.after if op in place]
    return Process(name or simulated.plan.schedule, tracks, arrows, _counters(simulated, members))


def _slice(simulated: Simulated, ran: Ran, members: Callable[[OpStep], list[Module]], limit: str) -> Slice:
    table = simulated.plan.modules.modules
    if ran.op is None:
        what = f"compute {table[ran.module].name}" if ran.module >= 0 else f"packing for {_op(simulated, ran)}"
        return Slice(what, ran.begin_s, ran.end_s)
    step = simulated.plan.steps[ran.number]
    assert isinstance(step, OpStep)
    details = {"modules": ", ".join(module.name for module in members(step)), "began after": limit}
    return Slice(str(ran.op), ran.begin_s, ran.end_s, details)


def _op(simulated: Simulated, ran: Ran) -> str:
    step = simulated.plan.steps[ran.number]
    return str(step.op) if isinstance(step, OpStep) else ""


def _waited(simulated: Simulated, stood: Stood) -> str:
    steps = simulated.plan.steps
    if stood.number < 0:
        return f"wait: {fsdp2_gather(simulated.plan.modules.modules[stood.module].name)}"
    return f"wait: {', '.join(map(str, steps[stood.number].waits))}" if stood.number < len(steps) else "wait: end of root"


def _counters(simulated: Simulated, members: Callable[[OpStep], list[Module]]) -> dict[str, Sequence[tuple[float, float]]]:
    steps = simulated.plan.steps
    moved = [
        (ran.begin_s, ran.end_s, wire_bytes(step, members(step)))
        for ran in simulated.ops
        if isinstance(step := steps[ran.number], OpStep) and step.communicator
    ]
    found: dict[str, Sequence[tuple[float, float]]] = {
        MEMORY: [(point.begin_s, point.size_bytes) for point in memory(simulated)],
        IN_FLIGHT: levels(moved),
    }
    if any(buffer.kind is BufferKind.PARAMETER for buffer in simulated.plan.buffers):
        found[PARAMETERS] = [(point.begin_s, point.size_bytes) for point in memory(simulated, [BufferKind.PARAMETER])]
    return found
