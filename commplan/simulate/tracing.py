"""A simulated backward as a process of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from commplan.graph.timeline import orders
from commplan.ops import COMPUTE_LANE, Kind, OpId
from commplan.plan.model import BufferKind, OpStep
from commplan.sight.trace import Process, Slice
from commplan.simulate.engine import Ran, Simulated
from commplan.simulate.predict import ONE_BACKWARD, limits, memory
from commplan.simulate.pricing import wire_bytes

MEMORY = "communication memory, bytes"
PARAMETERS = "gathered parameters, bytes"
IN_FLIGHT = "in flight, bytes"


def process(simulated: Simulated, name: str = "") -> Process:
    """Tracks: compute (where it stands still, what it waits for), and each lane. Arrows: from each op to those that come
    after it. Counters: memory, and bytes of the collectives under way.
    """
    limit_of = dict(zip(map(id, simulated.ops), limits(simulated), strict=True))
    tracks: dict[str, list[Slice]] = {COMPUTE_LANE: []}
    place: dict[OpId, tuple[str, int]] = {}
    spans: dict[str, list[tuple[float, Slice, OpId | None]]] = defaultdict(list)
    for ran in chain(simulated.compute, simulated.ops):
        spans[ran.lane].append((ran.begin_s, _slice(simulated, ran, limit_of.get(id(ran), "")), ran.op))
    for stood in simulated.waits:
        spans[COMPUTE_LANE].append((stood.begin_s, Slice(_waited(simulated, stood.number), stood.begin_s, stood.end_s), None))
    for lane in (COMPUTE_LANE, *(lane.name for lane in simulated.plan.lanes if lane.name != COMPUTE_LANE)):
        ordered = sorted(spans[lane], key=lambda span: (span[0], span[1].end_s))
        tracks[lane] = [one for _, one, _ in ordered]
        place |= {op: (lane, at) for at, (_, _, op) in enumerate(ordered) if op is not None}
    steps = [step for step in simulated.plan.steps if isinstance(step, OpStep)]
    arrows = [(place[op], place[step.op]) for step in steps for op in step.after if op in place]
    return Process(name or simulated.plan.schedule, tracks, arrows, _counters(simulated))


def _slice(simulated: Simulated, ran: Ran, limit: str) -> Slice:
    table = simulated.plan.modules.modules
    if ran.op is None:
        what = f"compute {table[ran.module].name}" if ran.module >= 0 else f"packing for {_op(simulated, ran)}"
        return Slice(what, ran.begin_s, ran.end_s)
    step = simulated.plan.steps[ran.number]
    assert isinstance(step, OpStep)
    details = {"modules": ", ".join(table[n].name for n in _members(simulated, step)), "began after": limit}
    return Slice(str(ran.op), ran.begin_s, ran.end_s, details)


def _op(simulated: Simulated, ran: Ran) -> str:
    step = simulated.plan.steps[ran.number]
    return str(step.op) if isinstance(step, OpStep) else ""


def _members(simulated: Simulated, step: OpStep) -> list[int]:
    completion, need = orders(simulated.plan.modules)
    order = need if step.kind is Kind.ALL_GATHER else completion
    return [order[n] for n in step.op.members]


def _waited(simulated: Simulated, number: int) -> str:
    steps = simulated.plan.steps
    return f"wait: {', '.join(map(str, steps[number].waits))}" if number < len(steps) else "wait: end of root"


def _counters(simulated: Simulated) -> dict[str, Sequence[tuple[float, float]]]:
    found: dict[str, Sequence[tuple[float, float]]] = {
        MEMORY: [(point.begin_s, point.size_bytes) for point in memory(simulated, ONE_BACKWARD)],
        IN_FLIGHT: _in_flight(simulated),
    }
    if any(buffer.kind is BufferKind.PARAMETER for buffer in simulated.plan.buffers):
        found[PARAMETERS] = [(point.begin_s, point.size_bytes) for point in memory(simulated, [BufferKind.PARAMETER])]
    return found


def _in_flight(simulated: Simulated) -> list[tuple[float, float]]:
    """Bytes of the tensors of the collectives under way, on one rank."""
    table = simulated.plan.modules.modules
    change: dict[float, int] = defaultdict(int)
    for ran in simulated.ops:
        step = simulated.plan.steps[ran.number]
        if isinstance(step, OpStep) and step.kind is not Kind.APPLY and ran.end_s > ran.begin_s:
            size_bytes = wire_bytes(step, [table[n] for n in _members(simulated, step)])
            change[ran.begin_s] += size_bytes
            change[ran.end_s] -= size_bytes
    level, found = 0, []
    for at_s in sorted(change):
        level += change[at_s]
        found.append((at_s, float(level)))
    return found
