"""From a schedule and a module table to a graph: ops, what they wait for and why, and the order of issue."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from commplan.graph import place
from commplan.graph.clocks import make_clocks
from commplan.graph.counts import few_pieces
from commplan.graph.cycles import Cutter
from commplan.graph.model import (
    Defects,
    Family,
    LateReference,
    Node,
    Origin,
    Reason,
    Role,
    ScheduleGraph,
)
from commplan.graph.timeline import Timeline, timeline
from commplan.language.modules import Module, ModuleTable
from commplan.language.spec import Line, OpLine, OpRef, ScheduleSpec, WaitLine
from commplan.ops import COMPUTE_LANE, TRAITS, Kind, OpId, Section

COMPUTE_FAMILY: Final = TRAITS[Kind.COMPUTE].family


def build(spec: ScheduleSpec, table: ModuleTable, params: Mapping[str, int], *, all_pieces: bool = True) -> ScheduleGraph:
    """The graph of `spec` over `table`; `params` binds every param of the schedule.

    Without `all_pieces` it has of each op the first pieces and the last, no more than it takes to find whatever is wrong.
    What can't be taken in as written (a cycle, a reference to a later op, ...) is left aside, in `defects`, for `check`.
    """
    draft = _Draft(spec, table, params, {} if all_pieces else few_pieces(spec, params), timeline(table))
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
        origins=tuple(draft.origins),
        predecessors=tuple(draft.predecessors),
        order=order,
        rank=tuple(rank),
        clocks=make_clocks(order, lanes, draft.predecessors),
        families=draft.families,
        defects=Defects(tuple(draft.repeated), tuple(draft.unknown()), tuple(draft.late.values()), tuple(draft.cycles)),
    )


@dataclass
class _Draft:
    """A graph in the making."""

    spec: ScheduleSpec
    table: ModuleTable
    params: Mapping[str, int]
    few_pieces: Mapping[int, int]
    timeline: Timeline
    nodes: list[Node] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=lambda: [Origin(reason) for reason in Reason])
    predecessors: list[dict[int, int]] = field(default_factory=list)
    families: dict[str, Family] = field(default_factory=dict)
    need_n: dict[str, list[int]] = field(default_factory=dict)
    done_n: dict[str, list[int]] = field(default_factory=dict)
    compute: range = range(0)
    hook_nodes: dict[int, int] = field(default_factory=dict)
    all_nodes: dict[str, range] = field(default_factory=dict)
    waits: list[tuple[int, int, int]] = field(default_factory=list)
    repeated: list[tuple[OpLine, OpLine]] = field(default_factory=list)
    late: dict[tuple[int, int], LateReference] = field(default_factory=dict)
    cycles: list[tuple[int, ...]] = field(default_factory=list)

    def origin(self, reason: Reason, ref: OpRef) -> int:
        """A number in `origins` for the edges that `ref` asks for."""
        self.origins.append(Origin(reason, ref))
        return len(self.origins) - 1

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
            grid = place.Grid(self.timeline)
            by_module: list[range] = []
            need_n: list[int] = []
            done_n: list[int] = []
            for members in place.buckets(line, modules, self.params):
                spots = [grid.spot(section, number, line.kind, n - offset) for n in members]
                need_n += [spot.need_n for spot in spots]
                done_n += [spot.done_n for spot in spots]
                spot = spots[0 if line.kind is Kind.ALL_GATHER else -1]
                left_out = not place.needs(modules[members[0]], line.kind)
                pieces = 1 if left_out else max(1, line.chunks.resolve(self.params))
                first_node = len(self.nodes)
                role = Role.LEFT_OUT if left_out else Role.OP
                few = self.few_pieces.get(pieces, pieces)
                for piece in (*range(few - 1), pieces - 1):
                    op = OpId(name, members[0], members[-1], piece, pieces)
                    self.nodes.append(Node(role, spot.hook, (*spot.key, piece), op, line, line.lane, communicator))
                by_module.extend([range(first_node, len(self.nodes))] * len(members))
            self.families[name] = Family(line, tuple(by_module))
            self.need_n[name], self.done_n[name] = need_n, done_n

    def place_waits(self) -> None:
        """Make a node for each wait in each hook in which it names an op of an existing module."""
        for section, number, line in self.lines():
            if not isinstance(line, WaitLine):
                continue
            grid = place.Grid(self.timeline)
            nodes: dict[tuple[int, tuple[int, ...]], int] = {}
            for ref in line.refs:
                kind = self.kind_of(ref)
                if kind is None:
                    continue
                origin = self.origin(Reason.WAIT, ref)
                for n, index in self.numbers(section, ref, kind):
                    spot = grid.spot(section, number, kind, n)
                    node = nodes.setdefault((spot.hook, spot.key), len(self.nodes))
                    if node == len(self.nodes):
                        self.nodes.append(Node(Role.WAIT, spot.hook, (*spot.key, 0), None, line, COMPUTE_LANE))
                    self.waits.append((node, index, origin))

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
        self.predecessors = [{} for _ in self.nodes]
        for name, family in self.families.items():
            for pieces in dict.fromkeys(family.pieces):
                for earlier, later in pairwise(pieces):
                    self.predecessors[later][earlier] = _UNWRITTEN[Reason.LANE]
            for ref in family.line.after:
                kind = self.kind_of(ref)
                if kind is None:
                    continue
                origin, offset = self.origin(Reason.AFTER, ref), ref.index.offset(self.params)
                numbers = self.need_n[name] if kind is Kind.ALL_GATHER else self.done_n[name]
                for member, pieces in enumerate(family.pieces):
                    number = numbers[member] + offset
                    itself = ref.family == name and number == member and not ref.index.every
                    self.link_op(pieces, origin, self.target(ref, number), itself=itself)
        for node, number, origin in self.waits:
            awaited = self.origins[origin].ref
            assert awaited is not None
            self.link_pair(self.target(awaited, number)[-1], node, origin)

    def target(self, ref: OpRef, number: int) -> range:
        """The nodes (the pieces of one op) that `ref` names, for module `number`; empty if there is no such module."""
        if ref.index.every:
            return self.all_node(ref.family)
        if ref.family in self.families:
            found = self.families[ref.family].pieces
            return found[number] if 0 <= number < len(found) else range(0)
        return self.compute[number : number + 1] if 0 <= number < len(self.compute) else range(0)

    def link_op(self, pieces: range, origin: int, target: range, *, itself: bool) -> None:
        """Let an op wait for `target`, piece for piece where both have as many. Members of a bucket, other than by naming
        themselves, don't wait for each other.
        """
        if not target or (target == pieces and not itself):
            return
        piecewise = len(target) == len(pieces)
        for piece, node in enumerate(pieces):
            self.link_pair(target[piece] if piecewise else target[-1], node, origin)

    def link_pair(self, first: int, second: int, origin: int) -> None:
        """Add one edge, unless `first` is issued in a later hook."""
        if self.nodes[first].hook > self.nodes[second].hook:
            ref = self.origins[origin].ref
            assert ref is not None
            lines = id(self.nodes[second].line), id(ref)
            if lines not in self.late or self.nodes[self.late[lines].node].key[1] < 0:  # a hook before the first: no example
                self.late[lines] = LateReference(second, first, ref)
        else:
            self.predecessors[second].setdefault(first, origin)

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
            self.predecessors.append(dict.fromkeys(ops, _UNWRITTEN[Reason.AFTER]))
        return self.all_nodes[name]

    def pieces(self, name: str) -> list[int]:
        """Every node of a family."""
        return [node for pieces in dict.fromkeys(self.families[name].pieces) for node in pieces]

    def sort(self) -> tuple[int, ...]:
        """The order of issue: hook by hook, topological in each, as written where that leaves a choice."""
        written = sorted(range(len(self.nodes)), key=lambda node: self.nodes[node].key)
        written.sort(key=lambda node: self.nodes[node].hook)
        order = _topological(self.predecessors, written)
        if len(order) < len(written):
            ordered = set(order)
            cutter = Cutter(self.predecessors, [(id(node.line), node.role is Role.ALL) for node in self.nodes])
            cutter.cut([node for node in written if node not in ordered])
            self.cycles = cutter.cycles
            order = _topological(self.predecessors, written)
        return tuple(order)

    def chain(self, order: Iterable[int]) -> None:
        """Add the edges that follow from the order: hooks, lanes and communicators."""
        last: dict[str, int] = {}
        for number in order:
            node = self.nodes[number]
            if node.role is Role.ALL:
                continue
            before = self.predecessors[number]
            on_compute = last.get(COMPUTE_LANE)
            if on_compute is not None:
                before.setdefault(on_compute, _UNWRITTEN[_COMPUTE_REASON[self.nodes[on_compute].role]])
            if node.lane != COMPUTE_LANE and node.lane in last:
                before.setdefault(last[node.lane], _UNWRITTEN[Reason.LANE])
            last[node.lane] = number
            if node.communicator:
                channel = f"communicator {node.communicator}"
                if channel in last:
                    before.setdefault(last[channel], _UNWRITTEN[Reason.COMMUNICATOR])
                last[channel] = number


_COMPUTE_REASON: Mapping[Role, Reason] = {
    Role.COMPUTE: Reason.HOOK,
    Role.HOOK: Reason.HOOK,
    Role.WAIT: Reason.WAIT,
    Role.OP: Reason.LANE,
    Role.LEFT_OUT: Reason.LANE,
}


_UNWRITTEN: Mapping[Reason, int] = {reason: number for number, reason in enumerate(Reason)}
"""The first of `origins`: of edges that no line asks for by name."""


def _topological(predecessors: Sequence[Mapping[int, int]], written: Sequence[int]) -> list[int]:
    """Every node after its predecessors and, where that leaves a choice, as in `written`; without those that are in a circle
    or behind one.
    """
    # The successors of a node as a chain through numbered edges: a list for each node is work for the garbage collector.
    last_edge = [-1] * len(written)
    edges: list[int] = []
    edge_before: list[int] = []
    for node, before in enumerate(predecessors):
        for first in before:
            edge_before.append(last_edge[first])
            last_edge[first] = len(edges)
            edges.append(node)
    missing = [len(before) for before in predecessors]
    place = [0] * len(written)
    for i, node in enumerate(written):
        place[node] = i
    ready = [i for i, node in enumerate(written) if not missing[node]]
    order: list[int] = []
    while ready:
        node = written[heapq.heappop(ready)]
        order.append(node)
        edge = last_edge[node]
        while edge >= 0:
            other = edges[edge]
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, place[other])
            edge = edge_before[edge]
    return order
