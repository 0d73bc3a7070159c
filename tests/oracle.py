"""An interpreter of schedules that shares nothing with the compiler but the parsed file.

It lays the lines out hook by hook, as language.md tells it, and runs them with one op held back for ever: whatever still
starts is not ordered after that op.  Slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from commplan.language.spec import Index, OpLine, ScheduleSpec, WaitLine
from commplan.ops import Kind, Section

REACH = 6
AXIS_OF = {Kind.ALL_GATHER: "shard", Kind.REDUCE_SCATTER: "shard", Kind.ALL_REDUCE: "replicate", Kind.APPLY: None}


class Wrong(Exception):
    """The schedule can't be run as written."""


@dataclass
class Item:
    """What is issued: an op (or the empty task of one left out), a wait, or the opening of a hook."""

    name: str
    lane: str
    communicator: str = ""
    kind: Kind | None = None
    modules: range = range(0)
    piece: int = 0
    pieces: int = 1
    deps: list[str] = field(default_factory=list)
    place: tuple[int, ...] = ()
    left_out: bool = False


@dataclass
class Layout:
    """A schedule over N equal modules, both orders alike."""

    spec: ScheduleSpec
    num_modules: int
    params: Mapping[str, int]
    needed: Callable[[Kind, int], bool] = lambda kind, n: True
    mesh: Callable[[int], object] = lambda n: None

    def lines(self) -> Iterator[tuple[Section, int, OpLine | WaitLine]]:
        for section in Section:
            for number, line in enumerate(self.spec.lines(section)):
                yield section, number, line

    def family(self, name: str) -> tuple[Section, OpLine]:
        found = [(s, line) for s, _, line in self.lines() if isinstance(line, OpLine) and line.ref.family == name]
        if not found:
            raise Wrong(f"{name} never runs")
        if len(found) > 1:
            raise Wrong(f"{name} placed twice")
        return found[0]

    def bucket(self, line: OpLine, n: int) -> range:
        """The modules that run with module n, for equal modules and `fuse: {modules: ...}`."""
        if line.fuse is None:
            return range(n, n + 1)
        assert line.fuse.modules is not None
        size, tail = line.fuse.modules.resolve(self.params), line.fuse.tail.resolve(self.params)
        end = self.num_modules - tail
        if n >= end or not self.needed(line.kind, n):
            return range(n, n + 1)

        def alike(m: int) -> bool:
            return self.needed(line.kind, m) and self.mesh(m) == self.mesh(n)

        start = n
        while start > 0 and alike(start - 1):
            start -= 1
        stop = n
        while stop < end and alike(stop):
            stop += 1
        first = start + (n - start) // size * size
        return range(first, min(first + size, stop))

    def pieces(self, line: OpLine, n: int) -> int:
        return line.chunks.resolve(self.params) if self.needed(line.kind, n) else 1

    def names(self, family: str, index: int, piece: int = 0, pieces: int = 1) -> list[str]:
        """What a reference from piece `piece` of `pieces` stands for."""
        if not 0 <= index < self.num_modules:
            return []
        if family == "compute":
            return [f"compute_{index}"]
        line = self.family(family)[1]
        members = self.bucket(line, index)
        count = self.pieces(line, index)
        chosen = [piece] if count == pieces else range(count)
        return [f"{family}_{members[0]}-{members[-1]}[{p}/{count}]" for p in chosen]

    def resolve(self, family: str, index: Index, n: int, piece: int = 0, pieces: int = 1) -> list[str]:
        if family != "compute":
            self.family(family)
        if index.every:
            return [name for m in range(self.num_modules) for name in self.names(family, m, piece=-1, pieces=-1)]
        return self.names(family, n + index.offset(self.params), piece, pieces)

    def slot(self, section: Section, n: int) -> tuple[int, ...]:
        """Hook of a line whose index is n: (0, n, pre or post) for a real hook, (1,) for root."""
        if section is Section.ROOT or n >= self.num_modules:
            return (1,)
        return (0, max(n, 0), 0 if n < 0 or section is Section.PRE_BACKWARD else 1)

    def place(self, section: Section, number: int, n: int) -> tuple[int, ...]:
        """Where a line stands within its hook."""
        if section is Section.ROOT:
            return (1, number, n)
        return (0, n, 0 if section is Section.PRE_BACKWARD else 1, number)

    def items(self) -> list[Item]:
        """Everything in the order of issue."""
        slots: dict[tuple[int, ...], list[Item]] = {}
        for section, number, line in self.lines():
            for n in self.hooks_of(section, line):
                for item in self.instances(section, number, line, n):
                    slots.setdefault(self.slot(section, n), []).append(item)
        order: list[Item] = []
        issued: set[str] = set()
        for slot in sorted({*slots, *((0, n, 1) for n in range(self.num_modules)), (1,)}):
            opening = f"compute_{slot[1]}" if slot[0] == 0 and slot[2] == 1 else f"open {slot}"
            order.append(Item(opening, "compute", kind=Kind.COMPUTE if opening.startswith("compute") else None))
            issued.add(opening)
            rest = sorted(slots.get(slot, []), key=lambda item: item.place)
            while rest:
                mine = {item.name for item in rest}
                ready = next((item for item in rest if not mine & set(item.deps)), None)
                if ready is None:
                    raise Wrong("a cycle")
                if not issued >= set(ready.deps):
                    raise Wrong(f"{ready.name} waits for what is issued later")
                rest.remove(ready)
                issued.add(ready.name)
                order.append(ready)
        return order

    def hooks_of(self, section: Section, line: OpLine | WaitLine) -> Iterator[int]:
        if section is Section.ROOT:
            star = isinstance(line, WaitLine) and all(ref.index.every for ref in line.refs)
            yield from range(1 if star else self.num_modules)
        else:
            yield from range(-REACH, self.num_modules + REACH)

    def instances(self, section: Section, number: int, line: OpLine | WaitLine, n: int) -> Iterator[Item]:
        place = self.place(section, number, n)
        real = section is Section.ROOT or 0 <= n < self.num_modules
        if isinstance(line, WaitLine):
            refs = [ref for ref in line.refs if not ref.index.every or (real and (section is not Section.ROOT or n == 0))]
            deps = [name for ref in refs for name in self.resolve(ref.family, ref.index, n, -1, -1)]
            if deps:
                yield Item(f"wait {place}", "compute", deps=deps, place=place)
            return
        module = n + line.ref.index.offset(self.params)
        if not 0 <= module < self.num_modules:
            return
        self.family(line.ref.family)
        members = self.bucket(line, module)
        if module != members[0 if line.kind is Kind.ALL_GATHER else -1]:
            return
        own = {lane.name for lane in self.spec.lanes if lane.own_communicator}
        communicator = "" if line.axis is None else f"{line.axis} {line.lane if line.lane in own else ''}"
        pieces = self.pieces(line, module)
        name = self.names(line.ref.family, module, -1, -1)
        for piece in range(pieces):
            deps = [name[piece - 1]] if piece else []
            for ref in line.after:
                itself = ref.index.offset(self.params) == line.ref.index.offset(self.params)
                for member in members:
                    found = self.resolve(ref.family, ref.index, n - module + member, piece, pieces)
                    deps += [dep for dep in found if ref.index.every or itself or dep not in name]
            left_out = not self.needed(line.kind, module)
            yield Item(name[piece], line.lane, communicator, line.kind, members, piece, pieces, deps, (*place, piece), left_out)


def blocked_by(items: list[Item], held: str) -> set[str]:
    """What never starts while `held` never ends."""
    over: set[str] = set()
    stuck: set[str] = set()
    for number, item in enumerate(items):
        before = items[:number]
        compute = all(other.name in over for other in before if other.lane == "compute")
        lane = all(other.name in over for other in before if other.lane == item.lane)
        channel = all(other.name in over for other in before if other.communicator and other.communicator == item.communicator)
        if compute and lane and channel and all(dep in over for dep in item.deps):
            if item.name != held:
                over.add(item.name)
        else:
            stuck.add(item.name)
    return stuck


def is_right(layout: Layout) -> bool:
    """Whether every timing gives every module its gradients, reduced over each axis and applied once."""
    try:
        items = layout.items()
    except Wrong:
        return False
    return lines_are_sound(layout) and gradients_are_right(items, layout.num_modules, layout.needed)


def lines_are_sound(layout: Layout) -> bool:
    """Axes, hooks of gathers, and `when`: what no timing can show."""
    whens = {}
    for section, line in ((section, line) for section, _, line in layout.lines() if isinstance(line, OpLine)):
        if line.axis != AXIS_OF[line.kind] or (line.kind is Kind.ALL_GATHER and section is Section.POST_BACKWARD):
            return False
        whens[line.kind] = line.when
    if (whens.get(Kind.REDUCE_SCATTER), whens.get(Kind.ALL_REDUCE)) != ("last_backward", "every"):
        return True
    modules = range(layout.num_modules)
    return not any(layout.needed(Kind.REDUCE_SCATTER, n) and layout.needed(Kind.ALL_REDUCE, n) for n in modules)


def gradients_are_right(items: list[Item], num_modules: int, needed: Callable[[Kind, int], bool]) -> bool:
    """Whether every module is gathered, reduced and applied once, each op after what it reads whatever is slow."""
    place = {item.name: number for number, item in enumerate(items)}
    blocked = {item.name: blocked_by(items, item.name) for item in items}
    by_name = {item.name: item for item in items}

    def ordered(first: Item, second: Item) -> bool:
        return place[first.name] < place[second.name] and second.name in blocked[first.name]

    def once(kind: Kind, n: int) -> list[Item] | None:
        """The pieces of the one op of a kind for module n; None if there are none or too many."""
        mine = [item for item in items if item.kind is kind and n in item.modules]
        families = {item.name.split("_")[0] for item in mine}
        whole = mine and [item.piece for item in mine] == list(range(mine[0].pieces))
        return mine if len(families) == 1 and whole else None

    gathers = any(item.kind is Kind.ALL_GATHER for item in items)
    for n in range(num_modules):
        compute = by_name[f"compute_{n}"]
        previous = [compute]
        for kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.APPLY):
            if not needed(kind, n):
                continue
            mine = once(kind, n)
            if mine is None or not all(ordered(compute, item) for item in mine):
                return False
            for item in mine:
                sources = [previous[item.piece]] if len(previous) == len(mine) else previous
                if not all(ordered(source, item) for source in sources):
                    return False
            previous = mine
        if gathers and needed(Kind.ALL_GATHER, n):
            mine = once(Kind.ALL_GATHER, n)
            if mine is None or not all(ordered(item, compute) for item in mine):
                return False
    return True
