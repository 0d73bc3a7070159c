"""Circles of ops that wait for each other: found, and cut so that all else has an order."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import networkx as nx

MAX_CYCLES: Final = 50
"""More cycles than this among the same ops are not listed: the first ones have to be cut anyway."""

MAX_VISITS: Final = 50_000
"""Nor are more looked for when so many nodes and edges were visited, in all the circles of a graph."""


@dataclass
class Cutter:
    """Takes the circles out of a graph.

    Attributes:
        predecessors: node -> what it waits for, with a number for where this comes from; edges of circles are taken out.
        labels: node -> what it shows in a finding: nodes of one label (the pieces of an op, the modules of a line) wait for
            each other in the same way.
        cycles: what was found, of those that show the same one; a node follows what it waits for.
        visits: nodes and edges visited to find them.
        shown: the labels of each.
    """

    predecessors: Sequence[dict[int, int]]
    labels: Sequence[Hashable]
    cycles: list[tuple[int, ...]] = field(default_factory=list)
    visits: int = 0
    shown: set[tuple[Hashable, ...]] = field(default_factory=set)

    def cut(self, nodes: Sequence[int]) -> None:
        """Note the cycles among `nodes`, which are in the order of the file, once for circles that come from the
        same dependencies, and take every edge of a circle out.
        """
        known: set[frozenset[int]] = set()
        place = {node: i for i, node in enumerate(nodes)}
        for component in _components(_digraph(nodes, self.predecessors), place):
            members = set(component)
            inner = [(node, first) for node in component for first in self.predecessors[node] if first in members]
            asked = frozenset(self.predecessors[node][first] for node, first in inner)
            if asked not in known:
                known.add(asked)
                self.note(component, place)
            for node, first in inner:
                del self.predecessors[node][first]

    def note(self, component: list[int], place: Mapping[int, int]) -> None:
        """Note cycles of one component: the shortest ones through its first node by each edge into it, then, with that node
        gone, those of what is still circular. Each label is the first only once.
        """
        tried: set[Hashable] = set()
        most = len(self.cycles) + MAX_CYCLES
        pending = [component]
        while pending and (not tried or (len(self.cycles) < most and self.visits < MAX_VISITS)):
            members = pending.pop()
            start = next((node for node in members if self.labels[node] not in tried), None)
            if start is None:
                continue
            tried.add(self.labels[start])
            graph = _digraph(members, self.predecessors)
            self.visits += graph.number_of_nodes() + graph.number_of_edges()
            for cycle in _through(graph, start, place):
                shown = tuple(self.labels[node] for node in cycle)
                if shown not in self.shown and len(self.cycles) < most:
                    self.shown.add(shown)
                    self.cycles.append(cycle)
            graph.remove_node(start)
            pending += reversed(_components(graph, place))


def _digraph(nodes: Sequence[int], predecessors: Sequence[Mapping[int, int]]) -> nx.DiGraph[int]:
    """The part of a graph that lies among `nodes`. Only a schedule that is wrong comes here: all others do without networkx,
    which takes as long to import as a schedule to check.
    """
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((first, node) for node in nodes for first in predecessors[node] if first in graph)
    return graph


def _components(graph: nx.DiGraph[int], place: Mapping[int, int]) -> list[list[int]]:
    """The strongly connected components that hold a cycle, and the nodes of each, by `place`."""
    import networkx as nx

    found = [sorted(c, key=place.__getitem__) for c in nx.strongly_connected_components(graph)]
    return sorted((c for c in found if len(c) > 1 or graph.has_edge(c[0], c[0])), key=lambda c: place[c[0]])


def _through(graph: nx.DiGraph[int], start: int, place: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """For each edge into `start` that a cycle has, a shortest cycle that ends with it; the shortest first, then by `place`.

    One search serves all of them: a path out of `start` does not come back to it.
    """
    reached_from = {start: start}
    queue = [start]
    for node in queue:
        for following in sorted(graph.succ[node], key=place.__getitem__):
            if following not in reached_from:
                reached_from[following] = node
                queue.append(following)
    for end in queue:
        if graph.has_edge(end, start):
            path = [end]
            while path[-1] != start:
                path.append(reached_from[path[-1]])
            yield tuple(reversed(path))
