"""How many modules it takes to see everything that a schedule can do.

A schedule is the same lines over and over, so a finding can depend on the number of modules N only through the ends: which
indices fall before 0 or past N-1.

Let the reach R be the largest distance between an op and the hook that places or names it (an offset, plus the length of a
bucket), and L the number of lanes.  Whether a read of module m is ordered after its write is settled by a path of edges from
the one to the other.  Every edge leads forward, over at most R hooks, to a lane or along one.  Knowledge of the write spreads
from lane to lane; what R+1 hooks in a row have not added to it, no later one will, as their edges are the same.  So it is
settled within L(R+1) hooks after the write, and it can only depend on
  - how far m is from 0, if that is less than R: edges to modules before 0 are missing;
  - how far m is from N-1, if that is less than L(R+1)+R: hooks past the end have no compute;
  - where buckets end: on N modulo their lengths, and on N less the tail.
N up to (L+2)(R+1), the lengths and tails of buckets included, shows every combination of these.  Between values that are sums
of up to two distances in the schedule, give or take one, no comparison of an index with 0 or N changes, so where R is large
only these are needed.

Equal modules over both axes are enough, too, `fuse` apart: an op that a module does not need is an empty task in its place, so
whatever is ordered where all ops run is ordered where some are left out.

Numbers beyond `MAX_MODULES` are left out.

Few pieces of each op are enough as well.  The pieces of an op follow each other on its lane, and each has the same edges as
the one before it: to the same piece of an op with as many, or to the last piece of one with more or fewer.  Only the first
and the last have others.  So of many pieces a few show what all of them do, as long as ops that have equally many still do,
and the rest do not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Final

from commplan.graph.place import wire_bytes
from commplan.language.modules import ModuleTable
from commplan.language.spec import Fuse, Line, OpLine, OpRef, ScheduleSpec
from commplan.ops import BUILT_IN_LANES, Section

SMALL_REACH: Final = 6
"""Up to this reach every number of modules is checked."""

MAX_MODULES: Final = 1500
"""More modules than this are not checked: enough for every offset that the language has."""

MAX_WORK: Final = 40_000
"""Lines, pieces and references times modules, about half a second's worth.  Files of hundreds of lines, which no schedule
needs, are checked for fewer numbers of modules.
"""

USUAL_LANES: Final = 16

FEW_PIECES: Final = 4
"""Ops in up to so many pieces are checked as they are."""


def enough_module_counts(spec: ScheduleSpec, params: Mapping[str, int], work: int = MAX_WORK) -> tuple[int, ...]:
    """Numbers of modules such that no other number has a finding that none of these has, as far as `work` allows.

    The first is the one that makes the best example: large enough for every line to fall into a hook of its own.
    """
    extent = _Extent.of(spec, params)
    most = min(extent.settled, MAX_MODULES)
    if extent.reach <= SMALL_REACH:
        counts = set(range(1, most + 1))
    else:
        steps = sorted({0, 1, *extent.distances, *extent.lengths, *extent.tails})
        sums = {one + other + nudge for one, other in combinations_with_replacement(steps, 2) for nudge in (-1, 0, 1)}
        counts = {count for count in {*range(1, SMALL_REACH), *sums} if 0 < count <= most}
    example = min(extent.reach + 3, most)
    return tuple(_within_budget((example, *sorted(counts - {example})), extent.weight, work))


def work_of(spec: ScheduleSpec, params: Mapping[str, int], counts: Iterable[int]) -> int:
    """What checking these numbers of modules takes, in the unit of `MAX_WORK`."""
    return _Extent.of(spec, params).weight * sum(counts)


def few_pieces(spec: ScheduleSpec, params: Mapping[str, int]) -> Mapping[int, int]:
    """Numbers of pieces in `spec` that are more than it takes -> how many show the same."""
    lines = [line for section in Section for line in spec.lines(section) if isinstance(line, OpLine)]
    many = sorted({n for n in (line.chunks.resolve(params) for line in lines) if n > FEW_PIECES})
    return {n: FEW_PIECES + 1 + place for place, n in enumerate(many)}


def landmarks(spec: ScheduleSpec, params: Mapping[str, int]) -> frozenset[int]:
    """Values near which a param may change what a schedule does: every distance in it, give or take one."""
    extent = _Extent.of(spec, params)
    return frozenset(d + nudge for d in extent.distances | extent.lengths | extent.tails for nudge in (-1, 0, 1))


def settled_module_count(spec: ScheduleSpec, params: Mapping[str, int]) -> int | None:
    """A number of modules at which what is not bounded shows: what of the first module lasts until the last one lasts as
    long with any larger number. None if it is too large to be tried.
    """
    extent = _Extent.of(spec, params)
    small = extent.settled <= MAX_MODULES and extent.settled * extent.whole_weight <= MAX_WORK // 4
    return extent.settled if small else None


@dataclass(frozen=True, slots=True)
class _Extent:
    """How far the lines of a schedule reach, in modules.

    Attributes:
        distances: offsets of references.
        lengths: modules in a bucket, by line.
        tails: modules left out of buckets at the end.
        lanes: lanes in use, compute included.
        weight: nodes and edges for each module, about, with few pieces for each op.
        whole_weight: with all pieces.
    """

    distances: frozenset[int]
    lengths: frozenset[int]
    tails: frozenset[int]
    lanes: int
    weight: int
    whole_weight: int

    @classmethod
    def of(cls, spec: ScheduleSpec, params: Mapping[str, int]) -> _Extent:
        """Measure the lines of `spec`."""
        lines = [line for section in Section for line in spec.lines(section)]
        distances = {abs(ref.index.offset(params)) for line in lines for ref in _refs(line) if not ref.index.every}
        lengths = {length for line in lines for length in _bucket_lengths(line, params)}
        tails = {line.fuse.tail.resolve(params) for line in lines if isinstance(line, OpLine) and line.fuse is not None}
        lanes = len({line.lane for line in lines if isinstance(line, OpLine)} | {BUILT_IN_LANES[0]})
        awaited = {ref.family for line in lines for ref in _refs(line) if ref.index.every}
        few = few_pieces(spec, params)
        weights = [
            sum(_weight(line, params, awaited, pieces) for line in lines) * (1 + lanes // USUAL_LANES) for pieces in (few, {})
        ]
        return cls(frozenset(distances), frozenset(lengths), frozenset(tails), lanes, *weights)

    @property
    def reach(self) -> int:
        """The largest distance between an op and the hook that places or names it."""
        return max(self.distances, default=0) + max(self.lengths, default=0)

    @property
    def settled(self) -> int:
        """(L+2)(R+1), and the lengths and tails of buckets."""
        period = min(math.lcm(*self.lengths), 2 * sum(self.lengths)) if self.lengths else 0
        return (self.lanes + 2) * (self.reach + 1) + period + max(self.tails, default=0)


def _within_budget(counts: Iterable[int], weight: int, work: int) -> Iterator[int]:
    """As many of `counts` as `work` allows, 1 at least."""
    spent = 0
    for count in counts:
        if spent + count * weight <= work:
            spent += count * weight
            yield count
    if not spent:
        yield 1


def _weight(line: Line, params: Mapping[str, int], awaited: Collection[str], few: Mapping[int, int]) -> int:
    """How many nodes and edges `line` makes for each module, about; all ops of the families in `awaited` have one more edge,
    to what is over when they all are.
    """
    if not isinstance(line, OpLine):
        return 1 + len(line.refs)
    num_pieces = line.chunks.resolve(params)
    return (1 + len(line.after) + (line.ref.family in awaited)) * few.get(num_pieces, num_pieces)


def _refs(line: Line) -> tuple[OpRef, ...]:
    return (line.ref, *line.after) if isinstance(line, OpLine) else line.refs


def _bucket_lengths(line: Line, params: Mapping[str, int]) -> Iterator[int]:
    """How many equal modules a bucket of `line` holds."""
    if isinstance(line, OpLine) and isinstance(line.fuse, Fuse):
        if line.fuse.modules is not None:
            yield max(1, line.fuse.modules.resolve(params))
        elif line.fuse.size_bytes is not None:
            (module,) = ModuleTable.uniform(1).modules
            yield max(1, line.fuse.size_bytes.resolve(params) // wire_bytes(module, line))
