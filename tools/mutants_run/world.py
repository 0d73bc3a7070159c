"""What a schedule is run on, and what is run: units of a model, and items in the order of issue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

AXIS_OF = {"all_gather": "shard", "reduce_scatter": "shard", "all_reduce": "replicate", "apply": None}
GATHER = "all_gather"


class Wrong(Exception):  # noqa: N818 - a verdict, not a failure
    """A schedule or plan that is wrong; the text says why."""


@dataclass(frozen=True)
class Unit:
    """One module: the axes (of 2 ranks each) that it is spread over, and elements of its one fp32 parameter."""

    axes: tuple[str, ...] = ("replicate", "shard")
    resharded: bool = True
    numel: int = 2**20

    def needs(self, kind: str) -> bool:
        """Whether an op of `kind` has anything to do for it."""
        if kind == GATHER:
            return "shard" in self.axes and self.resharded
        axis = AXIS_OF[kind]
        return axis is None or axis in self.axes

    def wire_bytes(self, kind: str, itemsize_bytes: int) -> int:
        """What a collective takes in on one rank."""
        whole = kind == "reduce_scatter" or "shard" not in self.axes
        return self.numel // (1 if whole else 2) * itemsize_bytes


@dataclass(frozen=True)
class World:
    """Units in the order in which their gradients become complete; `need` lists them in the order of their backward."""

    units: tuple[Unit, ...]
    need: tuple[int, ...]

    @classmethod
    def of(cls, *units: Unit, need: Sequence[int] = ()) -> World:
        """A world; `need` is the order of `units` if it is left out."""
        return cls(units, tuple(need) or tuple(range(len(units))))

    def order(self, kind: str) -> tuple[int, ...]:
        """Units as ops of `kind` count them."""
        return self.need if kind == GATHER else tuple(range(len(self.units)))

    def hooks(self) -> list[tuple[str, int, int]]:
        """Hooks as they open: section, number there, and how many units are done by then."""
        found: list[tuple[str, int, int]] = []
        opened = 0
        for n in range(len(self.units)):
            for i in range(opened, self.need.index(n) + 1):
                found.append(("pre_backward", i, n))
                opened = i + 1
            found.append(("post_backward", n, n + 1))
        return [*found, ("root", 0, len(self.units))]

    def __str__(self) -> str:
        plain = all(unit == Unit() for unit in self.units)
        told = f"{len(self.units)} modules"
        if not plain:
            told += f" ({'; '.join('+'.join(u.axes) + ('' if u.resharded else ' kept') for u in self.units)})"
        return told if self.need == tuple(range(len(self.units))) else f"{told}, needed in order {list(self.need)}"


@dataclass
class Item:
    """What is issued: an op, a wait, the opening of a hook, or (`begin`, `compute`) the backward of a unit.

    `starts_after` are names of other items, beside those that its lane implies.  `promised` are items that it says to come
    after without doing anything for it.  `units` are places in the world.
    """

    name: str
    lane: str
    kind: str = ""
    axis: str | None = None
    units: tuple[int, ...] = ()
    piece: int = 0
    pieces: int = 1
    channel: str = ""
    starts_after: list[str] = field(default_factory=list)
    promised: list[str] = field(default_factory=list)
    when: str = "every"
