"""Run items under adversarial timings, with symbolic gradients."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mutants_run import values
from mutants_run.values import GARBAGE, Value
from mutants_run.world import GATHER, Item, World, Wrong

Cell = tuple[str, int, int]
"""A buffer (parameters, gradient, shard, grad), a unit, and one of the equal pieces that buffers are cut into."""


def check(items: Sequence[Item], world: World, *, queues: bool) -> None:
    """Raise `Wrong` if some timing gives a wrong gradient, a read of a buffer in use, or no end.

    Each item in turn is held back for as long as anything else can run.  `queues` says that communicators run one op at a
    time by themselves; without, that is a promise which the waits have to keep.
    """
    before = _before(items, queues=queues)
    backwards = (False, True) if any(item.when != "every" for item in items) else (True,)
    num_cells = math.lcm(*(item.pieces for item in items))
    last_reduction, gathers = _last_reductions(items, world), any(item.kind == GATHER for item in items)
    for held in (-1, *range(len(items))):
        state = State(world, num_cells, last_reduction, gathers)
        for number, is_last in enumerate(backwards):
            state.begin(number, is_last=is_last)
            _run(items, before, held, state)
        state.finish(len(backwards))


def _before(items: Sequence[Item], *, queues: bool) -> list[list[int]]:
    """For each item, the items that have to be over when it starts."""
    last: dict[str, int] = {}
    place: dict[str, int] = {}
    found: list[list[int]] = []
    names = {item.name for item in items}
    for number, item in enumerate(items):
        keys = ["compute", item.lane] + ([f"channel {item.channel}"] if queues and item.channel else [])
        earlier = {last[key] for key in keys if key in last}
        for name in item.starts_after:
            if name not in place:
                raise Wrong(f"{item.name} waits for {name}, which is {'issued later' if name in names else 'never issued'}")
            earlier.add(place[name])
        found.append(sorted(earlier))
        last.update(dict.fromkeys([item.lane, *keys[2:]], number))
        if item.name in place:
            raise Wrong(f"{item.name} runs twice")
        place[item.name] = number
    return found


def _last_reductions(items: Sequence[Item], world: World) -> dict[int, str]:
    """For each unit, when its last reduction runs."""
    kinds = ("reduce_scatter", "all_reduce")
    found = dict.fromkeys(range(len(world.units)), "every")
    for kind in kinds:
        for item in items:
            if item.kind == kind:
                found.update({unit: item.when for unit in item.units if world.units[unit].needs(kind)})
    return found


def _run(items: Sequence[Item], before: list[list[int]], held: int, state: State) -> None:
    following: list[list[int]] = [[] for _ in items]
    for number, earlier in enumerate(before):
        for other in earlier:
            following[other].append(number)
    missing = [len(earlier) for earlier in before]
    ready = deque(number for number, count in enumerate(missing) if not count)
    over: set[str] = set()
    running: int | None = None

    def end(number: int) -> None:
        state.act(items[number])
        over.add(items[number].name)
        for other in following[number]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)

    while ready or running is not None:
        if not ready:
            assert running is not None
            end(running)
            running = None
            continue
        number = ready.popleft()
        item = items[number]
        broken = [name for name in item.promised if name not in over]
        if broken:
            raise Wrong(f"{item.name} may start before {broken[0]} is over, which it names in `after`")
        if running is not None:
            _meet(items[running], item, state)
        if number == held:
            running = number
        else:
            end(number)
    if len(over) < len(items):
        raise Wrong(f"{next(item.name for item in items if item.name not in over)} never starts")


def _meet(running: Item, starting: Item, state: State) -> None:
    """Two items at once: they must not share a communicator, nor a buffer that one of them writes."""
    if starting.channel and starting.channel == running.channel:
        raise Wrong(f"{starting.name} and {running.name} may be on communicator {starting.channel} at once")
    reads, writes = state.touched(running)
    other_reads, other_writes = state.touched(starting)
    shared = writes & (other_reads | other_writes) | reads & other_writes
    if shared:
        buffer, unit, _ = min(shared)
        raise Wrong(f"{starting.name} may start before {running.name} is over: both use the {buffer} of module {unit}")


@dataclass
class State:
    """Buffers and what they hold. What is not there is absent."""

    world: World
    num_cells: int
    last_reduction: dict[int, str]
    gathers: bool
    held: dict[Cell, Value] = field(default_factory=dict)
    partial: dict[Cell, Value] = field(default_factory=dict)
    backward: int = 0
    is_last: bool = True
    known: dict[str, tuple[frozenset[Cell], frozenset[Cell]]] = field(default_factory=dict)

    def begin(self, backward: int, *, is_last: bool) -> None:
        """Begin a backward: what an earlier one left unreduced is a partial sum."""
        self.backward, self.is_last = backward, is_last
        self.partial = {cell: value for cell, value in self.held.items() if cell[0] in ("gradient", "shard")}
        self.held = {cell: value for cell, value in self.held.items() if cell[0] == "grad"}
        self.known = {}

    def finish(self, num_backwards: int) -> None:
        """Check every `.grad`."""
        for unit, one in enumerate(self.world.units):
            for cell in range(self.num_cells):
                found = self.held.get(("grad", unit, cell))
                if found is None:
                    raise Wrong(f"module {unit} gets no gradient")
                if found != values.wanted(one.axes, num_backwards):
                    raise Wrong(f"module {unit} gets a wrong gradient")

    def runs(self, item: Item) -> bool:
        """Whether an op of the item's `when` runs in this backward; an apply if its last reduction does."""
        if item.kind == "apply":
            return self.is_last or all(self.last_reduction[unit] == "every" for unit in item.units)
        return self.is_last or item.when == "every"

    def cells(self, buffer: str, item: Item) -> Iterator[Cell]:
        """The cells of a buffer that a piece of an op is about."""
        size = self.num_cells // item.pieces
        for unit in item.units:
            yield from ((buffer, unit, cell) for cell in range(item.piece * size, (item.piece + 1) * size))

    def gradient(self, unit: int) -> str:
        """The buffer that backward fills: without a shard axis there is nothing to scatter, and it is the shard."""
        return "gradient" if "shard" in self.world.units[unit].axes else "shard"

    def touched(self, item: Item) -> tuple[frozenset[Cell], frozenset[Cell]]:
        """What an item reads, and what it writes or uses up."""
        if item.name not in self.known:
            reads: list[Cell] = []
            writes: list[Cell] = []
            if item.kind in ("begin", "compute"):
                reads += self.cells("parameters", item)
            if item.kind == "compute":
                writes += self.cells(self.gradient(item.units[0]), item)
            elif item.kind and item.kind != "begin" and self.runs(item):
                for buffer in _WRITES[item.kind]:
                    writes += self.cells(buffer, item)
            self.known[item.name] = frozenset(reads), frozenset(writes)
        return self.known[item.name]

    def act(self, item: Item) -> None:
        """Do what an item does."""
        if item.kind in ("begin", "compute"):
            self.compute(item)
        elif item.kind and self.runs(item):
            for unit in item.units:
                axes = self.world.units[unit].axes
                size = self.num_cells // item.pieces
                for cell in range(item.piece * size, (item.piece + 1) * size):
                    self.act_on(item, axes, unit, cell)

    def compute(self, item: Item) -> None:
        """Backward of a unit: it needs parameters (if they are for the schedule to gather) and leaves a gradient."""
        (unit,) = item.units
        axes = self.world.units[unit].axes
        for cell in range(self.num_cells):
            gathered = self.held.get(("parameters", unit, cell))
            if self.gathers and self.world.units[unit].needs(GATHER) and gathered != values.parameters(axes, whole=True):
                raise Wrong(f"the backward of module {unit} begins without its parameters")
            if item.kind == "compute":
                place = (self.gradient(unit), unit, cell)
                fresh = values.computed(axes, self.backward)
                self.held[place] = values.add(fresh, self.partial[place]) if place in self.partial else fresh

    def act_on(self, item: Item, axes: values.Axes, unit: int, cell: int) -> None:
        """One op on one cell."""
        shard, grad, gathered = ("shard", unit, cell), ("grad", unit, cell), ("parameters", unit, cell)
        if item.kind == GATHER:
            if gathered in self.held:
                raise Wrong(f"{item.name} gathers module {unit} once more")
            own = values.parameters(axes, whole=False)
            self.held[gathered] = values.collective(item.kind, own, axes, str(item.axis))
            return
        source = ("gradient", unit, cell) if item.kind == "reduce_scatter" else shard
        if source not in self.held:
            raise Wrong(f"{item.name} reads the {source[0]} of module {unit}, which is not there")
        value = self.held.pop(source)
        if item.kind == "apply":
            self.held[grad] = values.add(self.held[grad], value) if grad in self.held else value
        else:
            result = values.collective(item.kind, value, axes, str(item.axis))
            if item.kind == "reduce_scatter" and shard in self.partial:
                result = values.add(result, self.partial.pop(shard))
            self.held[shard] = result if result else GARBAGE


_WRITES = {
    GATHER: ("parameters",),
    "reduce_scatter": ("gradient", "shard"),
    "all_reduce": ("shard",),
    "apply": ("shard", "grad"),
}
