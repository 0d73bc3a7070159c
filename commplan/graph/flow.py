"""The data flow that a schedule has to respect: who writes what whom reads, per module, from the model and not the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from commplan.graph.model import Family, Role, ScheduleGraph
from commplan.language.spec import Line, OpLine
from commplan.ops import TRAITS, Axis, Kind, Section

GRADIENT_KINDS: Final = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.APPLY)


@dataclass(frozen=True, slots=True)
class Read:
    """One op reads what another writes. The backward of a module has no line; as a reader of parameters it stands for
    whatever compute does from the opening of hook `reader` on.
    """

    writer: int
    reader: int


@dataclass(frozen=True)
class Flow:
    """The data flow of one graph. Lines are meant by their `id`."""

    graph: ScheduleGraph

    @cached_property
    def misplaced(self) -> frozenset[int]:
        """Lines whose place in the order means nothing: in a hook that may not hold them, placed twice, over a wrong axis, or
        in a cycle.
        """
        graph = self.graph
        lines: list[Line | None] = [line for pair in graph.defects.repeated for line in pair]
        lines += [graph.nodes[number].line for cycle in graph.defects.cycles for number in cycle]
        lines += [f.line for f in graph.families.values() if f.line.axis is not TRAITS[f.line.kind].axis]
        lines += [line for section, line in op_lines(graph) if not may_hold(section, line, graph)]
        return frozenset(id(line) for line in lines)

    @cached_property
    def unsure(self) -> frozenset[int]:
        """Lines that wait for something which could not be resolved."""
        defects = self.graph.defects
        lines: list[Line | None] = [line for line, _ in defects.unknown]
        lines += [self.graph.nodes[late.node].line for late in defects.late]
        return frozenset(id(line) for line in lines)

    @cached_property
    def unsure_wait(self) -> bool:
        """Whether a wait could not be resolved, so that compute may know less than was meant."""
        waits = [line for section in Section for line in self.graph.spec.lines(section) if not isinstance(line, OpLine)]
        return any(id(line) in self.unsure for line in waits)

    def families(self, kind: Kind) -> list[Family]:
        """The families of a kind, in the order of the file."""
        return [family for family in self.graph.families.values() if family.line.kind is kind]

    def in_place(self, kind: Kind) -> Family | None:
        """The family that does `kind`, if its place means something."""
        found = self.families(kind)
        return found[0] if found and id(found[0].line) not in self.misplaced else None

    def reads(self) -> Iterator[Read]:
        """Every read that the order has to respect, in the order of modules. Linear in modules and pieces."""
        families = {kind: self.in_place(kind) for kind in Kind}
        gathered = families[Kind.ALL_GATHER]
        if gathered is not None:
            yield from self._parameter_reads(gathered)
        done: dict[tuple[Kind, Kind], tuple[range, range]] = {}
        first_compute = next((n for n, node in enumerate(self.graph.nodes) if node.role is Role.COMPUTE), 0)
        for n in range(len(self.graph.timeline.completion)):
            writer: range | None = range(first_compute + n, first_compute + n + 1)
            before = Kind.COMPUTE
            for kind in GRADIENT_KINDS:
                family = families[kind]
                if family is None:
                    writer = None if self.families(kind) else writer
                    continue
                reader = family.pieces[n]
                if self.graph.is_left_out(reader):
                    continue
                if writer is not None and done.get((before, kind)) != (writer, reader):
                    done[before, kind] = writer, reader
                    yield from _piecewise(writer, reader)
                writer, before = reader, kind

    def _parameter_reads(self, family: Family) -> Iterator[Read]:
        """The backward of a module reads what its AG writes; it begins when its pre-backward hook is over, at the latest
        when the next hook opens.
        """
        timeline = self.graph.timeline
        openings = [(node.hook, n) for n, node in enumerate(self.graph.nodes) if node.role in (Role.COMPUTE, Role.HOOK)]
        openings.sort()
        following = 0
        for n, pieces in enumerate(family.pieces):
            while openings[following][0] <= timeline.pre[n]:
                following += 1
            if not self.graph.is_left_out(pieces):
                yield Read(pieces[-1], openings[following][1])


def _piecewise(writer: range, reader: range) -> Iterator[Read]:
    """A piece reads the same piece where both have as many, else the whole."""
    if len(writer) == len(reader):
        return map(Read, writer, reader)
    return (Read(writer[-1], node) for node in reader)


def op_lines(graph: ScheduleGraph) -> Iterator[tuple[Section, OpLine]]:
    """Every line that places an op, with its section."""
    for section in Section:
        for line in graph.spec.lines(section):
            if isinstance(line, OpLine):
                yield section, line


def may_hold(section: Section, line: OpLine, graph: ScheduleGraph) -> bool:
    """Whether a section may place the op of a line."""
    offset = line.ref.index.offset(graph.params)
    if section is Section.ROOT:
        return True
    if section is Section.POST_BACKWARD:
        return line.kind is not Kind.ALL_GATHER and offset <= 0
    return offset >= 0 if line.kind is Kind.ALL_GATHER else offset < 0


def needed_axes(graph: ScheduleGraph, n: int) -> list[Axis]:
    """The mesh axes over which the gradients of module `n` have to be reduced."""
    axes = graph.module(Kind.COMPUTE, n).axes
    return [axis for axis in (Axis.SHARD, Axis.REPLICATE) if axis in axes]
