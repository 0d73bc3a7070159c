"""From a schedule and a module table to a graph: ops, what they wait for and why, and the order of issue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import networkx as nx

from commplan.graph import place
from commplan.graph.clocks import make_clocks
from commplan.graph.model import (
    Bucket,
    Defects,
    Family,
    LateReference,
    Node,
    Reason,
    Role,
    ScheduleGraph,
)
from commplan.graph.timeline import Timeline, timeline
from commplan.language.modules import Module, ModuleTable
from commplan.language.spec import Line, OpLine, OpRef, ScheduleSpec, WaitLine
from commplan.ops import COMPUTE_LANE, TRAITS, Kind, OpId, Section

COMPUTE_FAMILY: Final = TRAITS[Kind.COMPUTE].family

MAX_CYCLES: Final = 50
"""More cycles than this among the same ops are not listed: the first ones have to be cut anyway."""


def build(spec: ScheduleSpec, table: ModuleTable, params: Mapping[str, int]) -> ScheduleGraph:
    """The graph of `spec` over `table`; `params` binds every param of the schedule.

    What can't be taken in as written (a cycle, a reference to a later op, ...) is left aside, in `defects`, for `check`.
    """
    draft = _Draft(spec, table, params, timeline(table))
    draft.place_ops()
    draft.place_waits()
    draft.place_hooks()
    draft.link()
    order = draft.sort()
    draft.chain(order)
    lanes = ["" if node.role is Role.LEFT_OUT else node.lane for node in draft.nodes]
    rank = [0] * len(order)
    for place_in_order, number in enumerate(order):
        rank[number] = place_in_order
    return ScheduleGraph(
        spec=spec,
        table=table,
        params=params,
        timeline=draft.timeline,
        nodes=tuple(draft.nodes),
        digraph=nx.freeze(draft.digraph),
        order=order,
        rank=tuple(rank),
        clocks=make_clocks(order, lanes, draft.digraph.pred),
        families=draft.families,
        defects=Defects(tuple(draft.repeated), tuple(draft.unknown()), tuple(draft.late.values()), tuple(draft.cycles)),
    )


@dataclass
class _Draft:
    """A graph in the making."""

    spec: ScheduleSpec
    table: ModuleTable
    params: Mapping[str, int]
    timeline: Timeline
    nodes: list[Node] = field(default_factory=list)
    digraph: nx.DiGraph[int] = field(default_factory=nx.DiGraph)
    families: dict[str, Family] = field(default_factory=dict)
    spots: dict[str, list[place.Spot]] = field(default_factory=dict)
    compute: range = range(0)
    hook_nodes: dict[int, int] = field(default_factory=dict)
    all_nodes: dict[str, range] = field(default_factory=dict)
    waits: list[tuple[int, list[tuple[int, OpRef]]]] = field(default_factory=list)
    repeated: list[tuple[OpLine, OpLine]] = field(default_factory=list)
    late: dict[tuple[int, int], LateReference] = field(default_factory=dict)
    cycles: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def grid(self) -> place.Grid:
        return place.Grid(self.timeline)

    def lines(self) -> Iterator[tuple[Section, int, Line]]:
        """Every line with its section and its number there."""
        for section in Section:
            for number, line in enumerate(self.spec.lines(section)):
                yield section, number, line

    def modules(self, kind: Kind) -> list[Module]:
        """The modules that ops of `kind` count, in their order."""
        order = self.timeline.need if kind is Kind.ALL_GATHER else self.timeline.completion
        return [self.table.modules[i] for i in order]

    def place_ops(self) -> None:
        """Make a node for each piece of each op. A family belongs to the first line that places it."""
        own = {lane.name for lane in self.spec.lanes if lane.own_communicator}
        for section, number, line in self.lines():
            if not isinstance(line, OpLine):
                continue
            name = line.ref.family
            if name in self.families:
                self.repeated.append((line, self.families[name].line))
                continue
            communicator = "" if line.axis is None else f"{line.axis}@{line.lane}" if line.lane in own else str(line.axis)
            offset = line.ref.index.offset(self.params)
            modules = self.modules(line.kind)
            spots = [self.grid.spot(section, number, line.kind, n - offset) for n in range(len(modules))]
            by_module: list[Bucket] = []
            for members in place.buckets(line, modules, self.params):
                spot = spots[members[0] if line.kind is Kind.ALL_GATHER else members[-1]]
                left_out = not place.needs(modules[members[0]], line.kind)
                pieces = 1 if left_out else max(1, line.chunks.resolve(self.params))
                first_node = len(self.nodes)
                role = Role.LEFT_OUT if left_out else Role.OP
                for piece in range(pieces):
                    op = OpId(name, members[0], members[-1], piece, pieces)
                    self.nodes.append(Node(role, spot.hook, (*spot.key, piece), op, line, line.lane, communicator))
                bucket = Bucket(members[0], members[-1], left_out, range(first_node, len(self.nodes)))
                by_module.extend([bucket] * len(members))
            self.families[name] = Family(line, tuple(by_module))
            self.spots[name] = spots

    def place_waits(self) -> None:
        """Make a node for each wait in each hook in which it names an op of an existing module."""
        for section, number, line in self.lines():
            if not isinstance(line, WaitLine):
                continue
            wanted: dict[tuple[int, tuple[int, ...]], list[tuple[int, OpRef]]] = {}
            for ref in line.refs:
                kind = self.kind_of(ref)
                if kind is None:
                    continue
                for n, index in self.numbers(section, ref, kind):
                    spot = self.grid.spot(section, number, kind, n)
                    wanted.setdefault((spot.hook, spot.key), []).append((index, ref))
            for (hook, key), refs in wanted.items():
                self.waits.append((len(self.nodes), refs))
                self.nodes.append(Node(Role.WAIT, hook, (*key, 0), None, line, COMPUTE_LANE))

    def kind_of(self, ref: OpRef) -> Kind | None:
        """The kind of the op that `ref` names; None if no line places it."""
        if ref.family in self.families:
            return self.families[ref.family].line.kind
        return Kind.COMPUTE if ref.family == COMPUTE_FAMILY else None

    def unknown(self) -> Iterator[tuple[Line, OpRef]]:
        """References to families that no line places."""
        for _, _, line in self.lines():
            for ref in line.after if isinstance(line, OpLine) else line.refs:
                if self.kind_of(ref) is None:
                    yield line, ref

    def numbers(self, section: Section, ref: OpRef, kind: Kind) -> Iterator[tuple[int, int]]:
        """The values of `n` for which a wait for `ref` names something, each with the module it names (-1: all)."""
        num_modules = len(self.modules(kind))
        if ref.index.every:
            yield from ((n, -1) for n in range(min(1, num_modules) if section is Section.ROOT else num_modules))
        else:
            offset = ref.index.offset(self.params)
            yield from ((index - offset, index) for index in range(num_modules))

    def place_hooks(self) -> None:
        """Make a node for each compute, which opens a post-backward hook, and for each other hook that holds something."""
        first = len(self.nodes)
        for n, hook in enumerate(self.timeline.post):
            self.nodes.append(Node(Role.COMPUTE, hook, (-1,), OpId(COMPUTE_FAMILY, n), None, COMPUTE_LANE))
            self.hook_nodes[hook] = first + n
        self.compute = range(first, len(self.nodes))
        used = {node.hook for node in self.nodes} | {self.timeline.root}
        for hook in sorted(used - self.hook_nodes.keys()):
            self.hook_nodes[hook] = len(self.nodes)
            self.nodes.append(Node(Role.HOOK, hook, (-1,), None, None, COMPUTE_LANE))

    def link(self) -> None:
        """Add an edge for each written dependency and between the pieces of an op."""
        self.digraph.add_nodes_from(range(len(self.nodes)))
        for name, family in self.families.items():
            for bucket in dict.fromkeys(family.buckets):
                for earlier, later in zip(bucket.nodes, bucket.nodes[1:], strict=False):
                    self.digraph.add_edge(earlier, later, reason=Reason.LANE, ref=None)
            for member, bucket in enumerate(family.buckets):
                for ref in family.line.after:
                    kind = self.kind_of(ref)
                    if kind is not None:
                        number = self.spots[name][member].n(kind) + ref.index.offset(self.params)
                        itself = ref.family == name and number == member and not ref.index.every
                        self.link_op(bucket, ref, self.target(ref, number), itself=itself)
        for node, refs in self.waits:
            for number, ref in refs:
                self.link_pair(self.target(ref, number)[-1], node, ref, Reason.WAIT)

    def target(self, ref: OpRef, number: int) -> range:
        """The nodes (the pieces of one op) that `ref` names, for module `number`; empty if there is no such module."""
        if ref.index.every:
            return self.all_node(ref.family)
        if ref.family in self.families:
            found = self.families[ref.family].buckets
            return found[number].nodes if 0 <= number < len(found) else range(0)
        return self.compute[number : number + 1] if 0 <= number < len(self.compute) else range(0)

    def link_op(self, bucket: Bucket, ref: OpRef, target: range, *, itself: bool) -> None:
        """Let an op wait for `target`, piece for piece where both have as many. Members of a bucket, other than by naming
        themselves, don't wait for each other.
        """
        if not target or (target == bucket.nodes and not itself):
            return
        piecewise = len(target) == len(bucket.nodes)
        for piece, node in enumerate(bucket.nodes):
            self.link_pair(target[piece] if piecewise else target[-1], node, ref, Reason.AFTER)

    def link_pair(self, first: int, second: int, ref: OpRef, reason: Reason) -> None:
        """Add one edge, unless `first` is issued in a later hook."""
        if self.nodes[first].hook > self.nodes[second].hook:
            lines = id(self.nodes[second].line), id(ref)
            if lines not in self.late or self.nodes[self.late[lines].node].key[1] < 0:  # a hook before the first: no example
                self.late[lines] = LateReference(second, first, ref)
        elif not self.digraph.has_edge(first, second):
            self.digraph.add_edge(first, second, reason=reason, ref=ref)

    def all_node(self, name: str) -> range:
        """The node that is over when all ops of a family are; empty if there are no modules."""
        if name == COMPUTE_FAMILY:
            return self.compute[-1:]
        if name not in self.all_nodes:
            ops = self.pieces(name)
            if not ops:
                return range(0)
            node = len(self.nodes)
            self.all_nodes[name] = range(node, node + 1)
            hook = max(self.nodes[op].hook for op in ops)
            self.nodes.append(Node(Role.ALL, hook, (-1,), None, self.families[name].line))
            self.digraph.add_edges_from(((op, node) for op in ops), reason=Reason.AFTER, ref=None)
        return self.all_nodes[name]

    def pieces(self, name: str) -> list[int]:
        """Every node of a family."""
        return [node for bucket in dict.fromkeys(self.families[name].buckets) for node in bucket.nodes]

    def sort(self) -> tuple[int, ...]:
        """The order of issue: hook by hook, topological in each, as written where that leaves a choice."""
        keys = [(node.hook, *node.key) for node in self.nodes]
        try:
            return tuple(nx.lexicographical_topological_sort(self.digraph, key=keys.__getitem__))
        except nx.NetworkXUnfeasible:
            self.cut_cycles(keys)
            return tuple(nx.lexicographical_topological_sort(self.digraph, key=keys.__getitem__))

    def cut_cycles(self, keys: list[tuple[int, ...]]) -> None:
        """Note each cycle, one for each set of lines, from its earliest-written member, and take its edges out."""
        known: set[tuple[int, ...]] = set()
        components = [sorted(c, key=keys.__getitem__) for c in nx.strongly_connected_components(self.digraph)]
        loops = [c for c in components if len(c) > 1 or self.digraph.has_edge(c[0], c[0])]
        for component in sorted(loops, key=lambda c: keys[c[0]]):
            lines = tuple(id(self.nodes[n].line) for n in component)
            if lines not in known:
                known.add(lines)
                self.cycles.extend(islice(_cycles_of(self.digraph.subgraph(component).copy(), component), MAX_CYCLES))
            self.digraph.remove_edges_from(list(self.digraph.subgraph(component).edges))

    def first_of_lines(self, numbers: Iterable[int]) -> list[int]:
        """The first node of each line, and of each line's node for all ops."""
        found: dict[tuple[int, bool], int] = {}
        for number in numbers:
            node = self.nodes[number]
            found.setdefault((id(node.line), node.role is Role.ALL), number)
        return list(found.values())

    def chain(self, order: Iterable[int]) -> None:
        """Add the edges that follow from the order: hooks, lanes and communicators."""
        last: dict[str, int] = {}
        edges: list[tuple[int, int, Reason]] = []
        for number in order:
            node = self.nodes[number]
            if node.role is Role.ALL:
                continue
            on_compute = last.get(COMPUTE_LANE)
            if on_compute is not None:
                edges.append((on_compute, number, _COMPUTE_REASON[self.nodes[on_compute].role]))
            if node.lane != COMPUTE_LANE and node.lane in last:
                edges.append((last[node.lane], number, Reason.LANE))
            last[node.lane] = number
            if node.communicator:
                channel = f"communicator {node.communicator}"
                if channel in last:
                    edges.append((last[channel], number, Reason.COMMUNICATOR))
                last[channel] = number
        for first, second, reason in edges:
            if not self.digraph.has_edge(first, second):
                self.digraph.add_edge(first, second, reason=reason, ref=None)


_COMPUTE_REASON: Mapping[Role, Reason] = {
    Role.COMPUTE: Reason.HOOK,
    Role.HOOK: Reason.HOOK,
    Role.WAIT: Reason.WAIT,
    Role.OP: Reason.LANE,
    Role.LEFT_OUT: Reason.LANE,
}


def _cycles_of(graph: nx.DiGraph[int], starts: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Cycles of a graph, each the shortest through one of `starts`, cut after it was found. One start for each line is enough:
    the pieces of an op, and the modules of a line, wait for each other in the same way.
    """
    for start in starts:
        # To cut a cycle takes an edge into the start away, so the paths that lead out of it stay the shortest.
        paths = nx.single_source_shortest_path(graph, start)
        ends = [end for end in graph.predecessors(start) if end in paths]
        for end in sorted(ends, key=lambda end: (len(paths[end]), paths[end])):
            graph.remove_edge(end, start)
            yield tuple(paths[end])
