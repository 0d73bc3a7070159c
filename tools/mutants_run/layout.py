"""A schedule laid out over a world, hook by hook, as the language tells it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from mutants_run.reading import Line, Ref, Schedule
from mutants_run.world import GATHER, Item, Unit, World, Wrong

Key = tuple[int, ...]


@dataclass(frozen=True)
class Spot:
    """A place for a line: a hook, an order within it, and what `n` is there for gathers and for all else."""

    hook: int
    key: Key
    need_n: int
    done_n: int

    def n(self, kind: str) -> int:
        """What `n` is for ops of a kind."""
        return self.need_n if kind == GATHER else self.done_n


@dataclass(frozen=True)
class Family:
    """The line that places an op, and which modules run together, by the number of each."""

    line: Line
    buckets: tuple[range, ...]
    spots: tuple[Spot, ...]


@dataclass
class Layout:
    """Makes the items of a schedule."""

    schedule: Schedule
    world: World
    families: dict[str, Family] = field(default_factory=dict)

    @cached_property
    def hooks(self) -> list[tuple[str, int, int]]:
        """Hooks as they open."""
        return self.world.hooks()

    @cached_property
    def pre(self) -> list[int]:
        """Places of the hooks before backward."""
        return [place for place, hook in enumerate(self.hooks) if hook[0] == "pre_backward"]

    @cached_property
    def done_hooks(self) -> list[int]:
        """For each number of modules done, the first hook before backward that no smaller number misses: number v belongs to
        the first such hook that opens with at least v done.
        """
        most = max((self.hooks[place][2] for place in self.pre), default=-1)
        return [next(place for place in self.pre if self.hooks[place][2] >= v) for v in range(most + 1)]

    def items(self) -> list[Item]:
        """Everything in the order of issue.

        Raises:
            Wrong: an op is placed twice or never, or waits in a circle or for what is issued later.
        """
        for section, number, line in self.lines():
            if line.ref is None:
                continue
            if line.ref.family in self.families:
                raise Wrong(f"{line.ref.family} is placed twice")
            buckets = tuple(self.buckets(line))
            spots = tuple(self.spot(section, number, line.kind, n - line.ref.offset) for n in range(len(buckets)))
            self.families[line.ref.family] = Family(line, buckets, spots)
        placed: dict[int, list[tuple[Key, Item]]] = {}
        for name, family in self.families.items():
            for hook, key, item in self.ops(name, family):
                placed.setdefault(hook, []).append((key, item))
        for section, number, line in self.lines():
            if line.ref is None:
                for hook, key, item in self.waits(section, number, line):
                    placed.setdefault(hook, []).append((key, item))
        return self.issued(placed)

    def lines(self) -> Iterator[tuple[str, int, Line]]:
        """Every line, with its section and its number there."""
        for section, lines in self.schedule.lines.items():
            yield from ((section, number, line) for number, line in enumerate(lines))

    def issued(self, placed: dict[int, list[tuple[Key, Item]]]) -> list[Item]:
        """Hook by hook; in each, what waits for nothing else there first, then as written."""
        order: list[Item] = []
        issued: set[str] = set()
        begun: list[int] = []
        for place, (section, n, _) in enumerate(self.hooks):
            order += [Item(f"backward of {unit}", "compute", "begin", units=(unit,)) for unit in begun]
            begun = [self.world.need[n]] if section == "pre_backward" else []
            after_backward = section == "post_backward"
            opening = Item(f"compute_{n}", "compute", "compute", units=(n,)) if after_backward else None
            order.append(opening or Item(f"{section} {n}", "compute"))
            issued.add(order[-1].name)
            rest = [item for _, item in sorted(placed.get(place, []), key=lambda pair: pair[0])]
            while rest:
                here = {item.name for item in rest}
                item = next((item for item in rest if not here & set(item.starts_after)), None)
                if item is None:
                    raise Wrong(f"{rest[0].name} and others wait in a circle")
                late = set(item.starts_after) - issued
                if late:
                    raise Wrong(f"{item.name} waits for {min(late)}, which is issued later")
                rest.remove(item)
                issued.add(item.name)
                order.append(item)
        return order

    def spot(self, section: str, number: int, kind: str, n: int) -> Spot:
        """Where a line falls if `n`, for ops of `kind`, has this value."""
        root = len(self.hooks) - 1
        if section == "root":
            return Spot(root, (1, number, n), n, n)
        if section == "post_backward":
            post = [place for place, hook in enumerate(self.hooks) if hook[0] == "post_backward"]
            hook = 0 if n < 0 else post[n] if n < len(post) else root
            return Spot(hook, (0, n, 1, number), n, n)
        if kind == GATHER:
            beyond = n - len(self.pre)
            if 0 <= n < len(self.pre):
                done = self.hooks[self.pre[n]][2]
                return Spot(self.pre[n], (0, done, 0, number), n, done)
            done = n if n < 0 else len(self.done_hooks) + beyond
            return Spot(0 if n < 0 else root, (0, done, 0, number), n, done)
        if 0 <= n < len(self.done_hooks):
            hook = self.done_hooks[n]
            return Spot(hook, (0, n, 0, number), self.hooks[hook][1], n)
        need = n if n < 0 else len(self.pre) + n - len(self.done_hooks)
        return Spot(0 if n < 0 else root, (0, n, 0, number), need, n)

    def ops(self, name: str, family: Family) -> Iterator[tuple[int, Key, Item]]:
        """The items of a family."""
        line = family.line
        assert line.ref is not None
        order = self.world.order(line.kind)
        own = line.lane if line.lane in self.schedule.own else ""
        channel = f"{line.axis} {own}" if line.axis else ""
        for members in dict.fromkeys(family.buckets):
            spot = family.spots[members[0] if line.kind == GATHER else members[-1]]
            pieces = self.pieces(family, members)
            needed = self.world.units[order[members[0]]].needs(line.kind)
            for piece in range(pieces):
                yield (
                    spot.hook,
                    (*spot.key, piece),
                    Item(
                        f"{name}_{members[0]}-{members[-1]}[{piece}/{pieces}]",
                        line.lane,
                        line.kind if needed else "",
                        line.axis,
                        tuple(order[member] for member in members),
                        piece,
                        pieces,
                        channel,
                        self.needed_before(name, family, members, piece),
                        when=line.when,
                    ),
                )

    def needed_before(self, name: str, family: Family, members: range, piece: int) -> list[str]:
        """What a piece of a bucket starts after: the piece before it, and what each of its members waits for."""
        pieces = self.pieces(family, members)
        own = f"{name}_{members[0]}-{members[-1]}"
        found = [f"{own}[{piece - 1}/{pieces}]"] if piece else []
        for ref in family.line.after:
            for member in members:
                n = family.spots[member].n(self.kind(ref)) + ref.offset
                names = self.names(ref, n, piece, pieces)
                is_itself = ref.family == name and not ref.every and n == member
                found += [other for other in names if is_itself or ref.every or not other.startswith(f"{own}[")]
        return list(dict.fromkeys(found))

    def pieces(self, family: Family, members: range) -> int:
        """Pieces of a bucket; what is left out is whole."""
        unit = self.world.units[self.world.order(family.line.kind)[members[0]]]
        return family.line.pieces if unit.needs(family.line.kind) else 1

    def kind(self, ref: Ref) -> str:
        """The kind of op that a reference names."""
        if ref.family == "compute":
            return "compute"
        if ref.family not in self.families:
            raise Wrong(f"{ref.family} never runs")
        return self.families[ref.family].line.kind

    def names(self, ref: Ref, number: int, piece: int = -1, pieces: int = -1) -> list[str]:
        """The items that a reference stands for when it names module `number`, from one of so many pieces."""
        kind = self.kind(ref)
        if ref.every:
            one = Ref(ref.family, 0)
            every = (name for n in range(len(self.world.units)) for name in self.names(one, n))
            return list(dict.fromkeys(every))
        if not 0 <= number < len(self.world.units):
            return []
        if kind == "compute":
            return [f"compute_{number}"]
        family = self.families[ref.family]
        members = family.buckets[number]
        count = self.pieces(family, members)
        chosen = [piece] if count == pieces else range(count)
        return [f"{ref.family}_{members[0]}-{members[-1]}[{p}/{count}]" for p in chosen]

    def waits(self, section: str, number: int, line: Line) -> Iterator[tuple[int, Key, Item]]:
        """The items of a wait: one in each hook in which it names something."""
        found: dict[tuple[int, Key], list[str]] = {}
        num_modules = len(self.world.units)
        for ref in line.after:
            kind = self.kind(ref)
            if ref.every:
                values = range(1 if section == "root" else num_modules)
            else:
                values = range(-ref.offset, num_modules - ref.offset)
            for n in values:
                spot = self.spot(section, number, kind, n)
                found.setdefault((spot.hook, spot.key), []).extend(self.names(ref, n + ref.offset))
        for (hook, key), names in found.items():
            yield hook, (*key, 0), Item(f"wait {hook} {key}", "compute", starts_after=list(dict.fromkeys(names)))

    def buckets(self, line: Line) -> Iterator[range]:
        """For each module, those that run with it."""
        order = self.world.order(line.kind)
        units = [self.world.units[unit] for unit in order]
        first = 0
        while first < len(units):
            stop = first + 1
            while stop < len(units) and self.joins(line, units, first, stop):
                stop += 1
            yield from [range(first, stop)] * (stop - first)
            first = stop

    def joins(self, line: Line, units: list[Unit], first: int, n: int) -> bool:
        """Whether module n belongs to the bucket that begins with module `first`."""
        if (line.modules is None and line.size_bytes is None) or n >= len(units) - line.tail:
            return False
        members = [self.world.units[unit] for unit in self.world.order(line.kind)[first : n + 1]]
        if any(not unit.needs(line.kind) or unit.axes != members[0].axes for unit in members):
            return False
        if line.modules is not None:
            return len(members) <= line.modules
        return sum(unit.wire_bytes(line.kind, line.itemsize_bytes) for unit in members) <= (line.size_bytes or 0)
