"""From a graph to a plan: steps by hook, only the waits that are needed, and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commplan.graph.model import Node, Reason, Role, ScheduleGraph
from commplan.language.spec import OpLine
from commplan.ops import BUILT_IN_LANES, COMPUTE_LANE, WIRE_DTYPES, OpId, Section
from commplan.plan.buffers import buffers
from commplan.plan.model import Hook, LaneInfo, OpStep, Plan, Step, WaitStep
from commplan.plan.order import step_order


def lower(graph: ScheduleGraph) -> Plan:
    """The plan of a graph in which `check` finds no error."""
    hooks = _hooks(graph)
    return Plan(
        schedule=graph.spec.name,
        params=tuple((param.name, graph.params[param.name]) for param in graph.spec.params),
        modules=graph.table,
        lanes=_lanes(graph, hooks),
        hooks=hooks,
        buffers=buffers(hooks, graph.table, step_order(hooks)),
    )


def _hooks(graph: ScheduleGraph) -> tuple[Hook, ...]:
    """Every hook with its steps, save pre-backward hooks without any."""
    after = _after(graph)
    waits = _waits(graph, after)
    steps: list[Step] = []
    ends = [0] * len(graph.timeline.points)
    for number in graph.order:
        node = graph.nodes[number]
        if node.role is Role.WAIT:
            assert node.line is not None
            steps.append(WaitStep(after[number], waits[number], node.line.span))
        elif node.role is Role.OP:
            steps.append(_op_step(node, after[number], waits[number]))
        ends[node.hook] = len(steps)  # the order of issue is hook by hook
    hooks: list[Hook] = []
    first = 0
    for point, end in zip(graph.timeline.points, ends, strict=True):
        if end > first or point.section is not Section.PRE_BACKWARD:
            hooks.append(Hook(point.section, point.n, point.module, tuple(steps[first:end])))
            first = max(first, end)
    return tuple(hooks)


def _op_step(node: Node, after: tuple[OpId, ...], waits: tuple[OpId, ...]) -> OpStep:
    assert isinstance(node.line, OpLine)
    assert node.op is not None
    line = node.line
    dtype = WIRE_DTYPES[line.dtype] if line.dtype is not None else None
    return OpStep(
        node.op, line.kind, line.axis, line.lane, node.communicator, after, waits, dtype=dtype, when=line.when, span=line.span
    )


def _lanes(graph: ScheduleGraph, hooks: Sequence[Hook]) -> tuple[LaneInfo, ...]:
    """The lanes in use, compute first."""
    used = dict.fromkeys([COMPUTE_LANE, *(s.lane for hook in hooks for s in hook.steps if isinstance(s, OpStep))])
    declared = {lane.name: LaneInfo(lane.name, lane.priority, lane.own_communicator) for lane in graph.spec.lanes}
    assert all(name in declared or name in BUILT_IN_LANES for name in used)
    return tuple(declared.get(name, LaneInfo(name)) for name in used)


def _after(graph: ScheduleGraph) -> dict[int, tuple[OpId, ...]]:
    """What each node was asked to wait for. In place of ops that are left out, and of all ops of a family, stand the last ops
    on each lane that have to be over.
    """
    clocks = graph.clocks
    stands_for: dict[int, dict[int, int]] = {}
    found: dict[int, tuple[OpId, ...]] = {}
    for number in graph.order:
        asked: dict[int, None] = {}
        for predecessor, place in graph.predecessors[number].items():
            origin = graph.origins[place]
            written = origin.ref is not None or graph.nodes[number].role is Role.ALL
            if written and origin.reason in (Reason.AFTER, Reason.WAIT):
                asked.update(dict.fromkeys(stands_for[predecessor].values() if predecessor in stands_for else [predecessor]))
        role = graph.nodes[number].role
        if role in (Role.ALL, Role.LEFT_OUT):
            latest: dict[int, int] = {}
            for op in asked:
                known = latest.get(clocks.lane[op])
                if known is None or clocks.position[op] > clocks.position[known]:
                    latest[clocks.lane[op]] = op
            stands_for[number] = latest
        elif role in (Role.OP, Role.WAIT):
            found[number] = _names(graph, sorted(asked, key=graph.rank.__getitem__))
    return found


def _waits(graph: ScheduleGraph, after: Mapping[int, tuple[OpId, ...]]) -> dict[int, tuple[OpId, ...]]:
    """The fewest waits that give each node all it has to wait for, beyond its hook, compute and its lane; `after` is what it
    was asked to wait for.

    What must be over is one number for each lane, so the candidates are one op for each lane that is not far enough already;
    of these stay the ones that no other candidate implies.
    """
    clocks = graph.clocks
    found: dict[int, tuple[OpId, ...]] = {}
    last: dict[int, Sequence[int]] = {}
    compute = clocks.lanes[COMPUTE_LANE]
    nothing = (0,) * len(clocks.lanes)
    for number in graph.order:
        lane = clocks.lane[number]
        if lane < 0:
            continue
        if graph.nodes[number].role in (Role.OP, Role.WAIT):
            implied = list(map(max, last.get(lane, nothing), last.get(compute, nothing)))
            missing = [
                clocks.on_lane[place][count - 1] for place, count in enumerate(clocks.start(number)) if count > implied[place]
            ]
            needed = [op for op in missing if not any(other != op and clocks.before(op, other) for other in missing)]
            named = _names(graph, sorted(needed, key=graph.rank.__getitem__))
            found[number] = after[number] if after[number] == named else named  # most often the same: one object for both
        last[lane] = clocks.end[number]
    return found


def _names(graph: ScheduleGraph, numbers: Sequence[int]) -> tuple[OpId, ...]:
    names = []
    for number in numbers:
        op = graph.nodes[number].op
        assert op is not None
        names.append(op)
    return tuple(names)
