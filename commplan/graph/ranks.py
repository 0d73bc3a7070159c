"""What several ranks do together: which collectives meet, and how far backward gets if each rank waits for its peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from commplan.graph.model import Role, ScheduleGraph, successors
from commplan.graph.place import wire_bytes, wire_dtype
from commplan.language.spec import OpLine
from commplan.ops import Axis, OpId

Channel = tuple[object, ...]
"""What names one communicator: the plan's name for it, the mesh and its sizes, and the ranks that share it."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a collective carries. Collectives meet in order, whatever they carry; these have to be equal."""

    kind: str
    modules: tuple[str, ...]
    piece: int
    pieces: int
    dtype: str
    size_bytes: int
    when: str


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in a collective: `node` of its graph, on `channel`, which `members` share."""

    rank: int
    node: int
    channel: Channel
    members: tuple[int, ...]
    content: Content


@dataclass(frozen=True)
class World:
    """The graphs of several ranks, in the order of ranks.

    With as many ranks as the largest mesh has, a rank's peers follow from its number: ranks are laid out row by row over
    (replicate, shard), and modules over one of the axes are on that part of the mesh.  With fewer, they are taken to share
    every group that has more than one rank.
    """

    graphs: tuple[ScheduleGraph, ...]

    @cached_property
    def mesh(self) -> tuple[int, int]:
        """Sizes (replicate, shard) of the largest mesh."""
        modules = {id(graph.table): graph.table.modules for graph in self.graphs}.values()
        meshes = ((m.axes.get(Axis.REPLICATE, 1), m.shard_size) for table in modules for m in table)
        return max(meshes, key=lambda sizes: sizes[0] * sizes[1])

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank of the largest mesh is here."""
        return self.mesh[0] * self.mesh[1] == len(self.graphs)

    @cached_property
    def collectives(self) -> tuple[tuple[Collective, ...], ...]:
        """For each rank, its collectives in the order of issue."""
        of_graph: dict[int, list[_Part]] = {id(graph): list(_parts(graph)) for graph in self.graphs}
        return tuple(
            tuple(self._collective(rank, part) for part in of_graph[id(graph)]) for rank, graph in enumerate(self.graphs)
        )

    def _collective(self, rank: int, part: _Part) -> Collective:
        members = self._members(rank, part)
        return Collective(rank, part.node, (part.communicator, part.group, part.axes, members), members, part.content)

    def _members(self, rank: int, part: _Part) -> tuple[int, ...]:
        """The ranks, of those that are here, that take part."""
        sizes = dict(part.axes)
        if sizes[part.axis] == 1:
            return (rank,)
        if not self.is_whole:
            return tuple(range(len(self.graphs)))
        shard = sizes.get(Axis.SHARD, self.mesh[1] if sizes[part.axis] == self.mesh[0] else 1)
        if part.axis is Axis.SHARD:
            first, step = rank - rank % shard, 1
        else:
            first, step = rank - rank % (shard * sizes[part.axis]) + rank % shard, shard
        return tuple(range(first, min(first + step * sizes[part.axis], len(self.graphs)), step))

    def channels(self) -> Mapping[Channel, Mapping[int, list[Collective]]]:
        """For each communicator, what each of its ranks issues to it, in order."""
        found: dict[Channel, dict[int, list[Collective]]] = {}
        for own in self.collectives:
            for collective in own:
                by_rank = found.setdefault(collective.channel, {rank: [] for rank in collective.members})
                by_rank.setdefault(collective.rank, []).append(collective)
        return found

    def name(self, collective: Collective) -> str:
        """What to call a rank's part: `AR_3 (layers.4)`."""
        return f"{self.op(collective)} ({', '.join(collective.content.modules)})"

    def op(self, collective: Collective) -> OpId:
        """The op of a rank's part, as its own plan counts modules."""
        op = self.graphs[collective.rank].nodes[collective.node].op
        assert op is not None
        return op

    def line(self, collective: Collective) -> OpLine:
        """Where the schedule places it."""
        line = self.graphs[collective.rank].nodes[collective.node].line
        assert isinstance(line, OpLine)
        return line


@dataclass(frozen=True, slots=True)
class _Part:
    """A collective of a graph, not yet of a rank."""

    node: int
    axis: Axis
    communicator: str
    group: str
    axes: tuple[tuple[Axis, int], ...]
    content: Content


def _parts(graph: ScheduleGraph) -> Iterator[_Part]:
    for number in graph.order:
        node = graph.nodes[number]
        if node.role is not Role.OP or not isinstance(node.line, OpLine) or node.line.axis is None:
            continue
        assert node.op is not None
        line, axis = node.line, node.line.axis
        modules = [graph.module(line.kind, n) for n in node.op.members]
        content = Content(
            line.kind,
            tuple(module.name for module in modules),
            node.op.piece,
            node.op.pieces,
            wire_dtype(modules[0], line),
            sum(wire_bytes(module, line) for module in modules),
            line.when,
        )
        axes = tuple(sorted(modules[0].axes.items()))
        yield _Part(number, axis, node.communicator, modules[0].group, axes, content)


class Run:
    """Runs all ranks as far as they get; what a collective needs of others is that they have started it.

    A node starts when everything before it in its graph is over; a collective is over when every member has started its
    part.  With `in_flight`, a rank issues a collective only while fewer than so many, issued before, are not over.  Nothing
    that starts or ends can keep anything else from doing so later, so one run shows what every timing comes to.

    Every rank of a communicator has to bring the same number of collectives.
    """

    def __init__(self, world: World, in_flight: int | None = None) -> None:
        graphs = world.graphs
        self.world = world
        self.in_flight = in_flight
        self.missing = [[len(before) for before in graph.predecessors] for graph in graphs]
        self.following = [successors(graph.predecessors) for graph in graphs]
        self.over = [[False] * len(graph.nodes) for graph in graphs]
        self.place = [{part.node: i for i, part in enumerate(own)} for own in world.collectives]
        self.issued, self.num_over = [0] * len(graphs), [0] * len(graphs)
        self.meetings: list[tuple[Collective, ...]] = []
        for by_rank in world.channels().values():
            self.meetings += zip(*by_rank.values(), strict=True)
        self.meeting_of: list[dict[int, int]] = [{} for _ in graphs]
        for number, parts in enumerate(self.meetings):
            for part in parts:
                self.meeting_of[part.rank][part.node] = number
        self.started: list[set[int]] = [set() for _ in self.meetings]
        self.ready: deque[tuple[int, int]] = deque()
        for rank, graph in enumerate(graphs):
            self.ready.extend((rank, node) for node in graph.order if not self.missing[rank][node])
            self.issue(rank)
        while self.ready:
            self.start(*self.ready.popleft())

    def issue(self, rank: int) -> None:
        """Issue as many collectives of a rank as may be."""
        own = self.world.collectives[rank]
        while self.issued[rank] < len(own) and (
            self.in_flight is None or self.issued[rank] - self.num_over[rank] < self.in_flight
        ):
            node = own[self.issued[rank]].node
            self.issued[rank] += 1
            if not self.missing[rank][node]:
                self.ready.append((rank, node))

    def is_issued(self, rank: int, node: int) -> bool:
        """Whether a node is no collective, or one that has been issued."""
        place = self.place[rank].get(node)
        return place is None or place < self.issued[rank]

    def start(self, rank: int, node: int) -> None:
        """Start a node before which everything is over; end what that ends."""
        if self.over[rank][node] or not self.is_issued(rank, node):
            return
        meeting = self.meeting_of[rank].get(node)
        if meeting is None:
            self.end(rank, node)
            return
        self.started[meeting].add(rank)
        if len(self.started[meeting]) == len(self.meetings[meeting]):
            for part in self.meetings[meeting]:
                self.end(part.rank, part.node)

    def end(self, rank: int, node: int) -> None:
        """Note that a node is over."""
        self.over[rank][node] = True
        for following in self.following[rank][node]:
            self.missing[rank][following] -= 1
            if not self.missing[rank][following]:
                self.ready.append((rank, following))
        if node in self.place[rank]:
            self.num_over[rank] += 1
            self.issue(rank)

    def deadlock(self) -> tuple[Collective, ...]:
        """Collectives, each started by its rank and waiting for the rank of the next one (the last for that of the first);
        empty if backward ends.
        """
        stuck: tuple[int, int] | None = next(
            ((rank, node) for rank, graph in enumerate(self.world.graphs) for node in graph.order if not self.over[rank][node]),
            None,
        )
        seen: dict[tuple[int, int], int] = {}
        waiting: list[Collective] = []
        while stuck is not None and stuck not in seen:
            rank, node = stuck
            seen[stuck] = len(waiting)
            place = self.place[rank].get(node)
            has_started = place is not None and not self.missing[rank][node] and self.is_issued(rank, node)
            if has_started and place is not None:
                part = self.world.collectives[rank][place]
                waiting.append(part)
                stuck = self.late_peer(part)
            else:
                stuck = rank, self.blocker(rank, node)
        return tuple(waiting[seen[stuck] :]) if stuck is not None else ()

    def late_peer(self, part: Collective) -> tuple[int, int]:
        """A peer's part in the same collective that has not started."""
        meeting = self.meeting_of[part.rank][part.node]
        return next((c.rank, c.node) for c in self.meetings[meeting] if c.rank not in self.started[meeting])

    def blocker(self, rank: int, node: int) -> int:
        """What keeps a node of a rank from starting: something before it, or else an earlier collective that is in flight."""
        before = [n for n in self.world.graphs[rank].predecessors[node] if not self.over[rank][n]]
        if before:
            return before[0]
        own = self.world.collectives[rank][: self.issued[rank]]
        return next(part.node for part in own if not self.over[rank][part.node])
