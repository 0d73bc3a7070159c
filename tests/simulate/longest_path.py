"""When ops end by definition: the longest path to each through everything that a schedule asks for.

It knows a plan's ops and what each `after` names, never the waits that the plan keeps; and it has no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import networkx as nx

from commplan.ops import COMPUTE_LANE, TRAITS, Kind, OpId, Section
from commplan.plan.model import Hook, OpStep, Plan

COMPUTE_FAMILY = TRAITS[Kind.COMPUTE].family

Node = tuple[str, object]


class Paths:
    """A graph of nodes that take time, and of queues in which each follows the one before."""

    def __init__(self) -> None:
        self.graph = nx.DiGraph()
        self._last: dict[str, Node] = {}

    def add(self, node: Node, takes: Fraction, *queues: str) -> None:
        """`node` comes next in each of `queues`."""
        self.graph.add_node(node, takes=takes)
        for queue in filter(None, queues):
            if queue in self._last:
                self.graph.add_edge(self._last[queue], node)
            self._last[queue] = node

    def ends(self) -> dict[Node, Fraction]:
        """When each node ends at the earliest."""
        end: dict[Node, Fraction] = {}
        for node, takes in ((node, self.graph.nodes[node]["takes"]) for node in nx.topological_sort(self.graph)):
            end[node] = max((end[before] for before in self.graph.predecessors(node)), default=Fraction(0)) + takes
        return end


def ends(
    plan: Plan, compute: Mapping[int, Fraction], seconds: Mapping[OpId, Fraction]
) -> tuple[dict[OpId, Fraction], Fraction]:
    """When each op ends, and when backward does.

    Args:
        compute: of each module, by its index.
        seconds: that each op takes.
    """
    paths = Paths()
    done: set[int] = set()
    for at, hook in enumerate(plan.hooks):
        for module in needed(plan, hook):
            if module not in done:
                done.add(module)
                paths.add(("compute", module), compute[module], COMPUTE_LANE)
        for place, step in enumerate(hook.steps):
            reached: Node = ("reached", (at, place))
            paths.add(reached, Fraction(0), COMPUTE_LANE)
            if isinstance(step, OpStep):
                communicator = f"communicator {step.communicator}" if step.communicator else ""
                paths.add(("op", step.op), seconds[step.op], step.lane, communicator)
                paths.graph.add_edge(reached, ("op", step.op))
            for op in step.after:
                if op.family != COMPUTE_FAMILY:
                    paths.graph.add_edge(("op", op), ("op", step.op) if isinstance(step, OpStep) else reached)
    found = paths.ends()
    return {op: end for (kind, op), end in found.items() if kind == "op"}, max(found.values(), default=Fraction(0))  # type: ignore[misc]


def needed(plan: Plan, hook: Hook) -> list[int]:
    """The modules whose backward is over when a hook opens; its own opens only then. Behind the last module that is trained
    there is no backward.
    """
    trained = [bool(module.trainable) for module in plan.modules.modules]
    order = list(plan.modules.need_order)
    while order and not trained[order[-1]]:
        order.pop()
    if hook.section is Section.ROOT:
        return order
    return order[: order.index(hook.module) + (hook.section is Section.POST_BACKWARD)]
