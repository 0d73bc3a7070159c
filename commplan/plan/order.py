"""What is known to be over when, from the steps of a plan alone: hooks, lanes and the waits that the executor performs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commplan.graph.clocks import Clocks, make_clocks
from commplan.ops import COMPUTE_LANE, OpId
from commplan.plan.model import Hook, OpStep, Step


@dataclass(frozen=True)
class StepOrder:
    """Happens-before over steps. A node is a hook's opening or a step, numbered in order; hook openings stand on the
    compute lane.

    Attributes:
        clocks: over nodes.
        node: step number -> node.
        opening: place of a hook in the plan -> node.
        step_of: op -> step number.
        known: step number -> the compute-lane step after which compute is known to be behind it; the number of steps if
            that is only so at the end of root.
    """

    clocks: Clocks
    node: Sequence[int]
    opening: Sequence[int]
    step_of: dict[OpId, int]
    known: Sequence[int]

    def before(self, first: int, second: int) -> bool:
        """Whether step `first`, an op, is always over before step `second` starts."""
        return self.clocks.before(self.node[first], self.node[second])


def lane_of(step: Step) -> str:
    """The lane a step runs on; a wait is one of compute."""
    return step.lane if isinstance(step, OpStep) else COMPUTE_LANE


def step_order(hooks: Iterable[Hook]) -> StepOrder:
    """Happens-before over the steps of `hooks`. Every wait must name an op of an earlier step."""
    lanes: list[str] = []
    predecessors: list[tuple[int, ...]] = []
    node: list[int] = []
    opening: list[int] = []
    last: dict[str, int] = {}
    node_of: dict[OpId, int] = {}

    def add(lane: str, waits: Iterable[OpId]) -> int:
        before = (last[name] for name in dict.fromkeys((COMPUTE_LANE, lane)) if name in last)
        predecessors.append((*before, *(node_of[op] for op in waits)))
        lanes.append(lane)
        last[lane] = len(lanes) - 1
        return last[lane]

    for hook in hooks:
        opening.append(add(COMPUTE_LANE, ()))
        for step in hook.steps:
            node.append(add(lane_of(step), step.waits))
            if isinstance(step, OpStep):
                node_of[step.op] = node[-1]
    clocks = make_clocks(range(len(lanes)), lanes, predecessors)
    step_at = {n: number for number, n in enumerate(node)}
    return StepOrder(clocks, node, opening, {op: step_at[n] for op, n in node_of.items()}, _known(clocks, node, step_at))


def _known(clocks: Clocks, node: Sequence[int], step_at: dict[int, int]) -> list[int]:
    known = [len(node)] * len(node)
    seen = [0] * len(clocks.lanes)
    for compute_node in clocks.on_lane[clocks.lanes[COMPUTE_LANE]]:
        if compute_node not in step_at:
            continue
        for lane, count in enumerate(clocks.end[compute_node]):
            for over in clocks.on_lane[lane][seen[lane] : count]:
                if over in step_at:
                    known[step_at[over]] = step_at[compute_node]
            seen[lane] = max(seen[lane], count)
    return known
