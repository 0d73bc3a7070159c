"""Where each line of a schedule falls: its ops and waits, module by module, in hooks; drained at both ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from commplan.graph.timeline import Timeline
from commplan.language.modules import Module
from commplan.language.spec import OpLine
from commplan.ops import ITEMSIZE_BYTES, WIRE_DTYPES, Axis, Kind, Section

HOOK_LINES: Final = 0
ROOT_LINES: Final = 1
"""What the keys of lines begin with: in root, lines of hooks past the last come before those of root itself."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place for an op or a wait: a hook, an order within it, and what `n` is there (for AG, and for all else)."""

    hook: int
    key: tuple[int, ...]
    need_n: int
    done_n: int

    def n(self, kind: Kind) -> int:
        """What `n` means for an op of `kind`."""
        return self.need_n if kind is Kind.ALL_GATHER else self.done_n


@dataclass(frozen=True, slots=True)
class Grid:
    """The hooks of a timeline, and hooks imagined before the first and after the last one.

    Hooks before the first fall into the first hook, hooks after the last into the start of root, in their own order.
    A pre-backward hook counts modules in need order for AG; for everything else its `n` is the number of modules done, and
    it holds every such `n` that no earlier hook held, so that nested units skip none and repeat none.
    """

    timeline: Timeline

    @property
    def num_done_numbers(self) -> int:
        """How many values of `n` the real pre-backward hooks hold, AG apart."""
        return len(self.timeline.first_pre)

    def spot(self, section: Section, line: int, kind: Kind, n: int) -> Spot:
        """Where line number `line` of `section` falls when its `n`, for an op of `kind`, has this value."""
        timeline = self.timeline
        if section is Section.ROOT:
            return Spot(timeline.root, (ROOT_LINES, line, n), n, n)
        if section is Section.POST_BACKWARD:
            hook = 0 if n < 0 else timeline.post[n] if n < len(timeline.post) else timeline.root
            return Spot(hook, (HOOK_LINES, n, 1, line), n, n)
        if kind is Kind.ALL_GATHER:
            return self._need_spot(line, n)
        num = self.num_done_numbers
        if n < 0:
            return Spot(0, (HOOK_LINES, n, 0, line), n, n)
        if n < num:
            hook = timeline.first_pre[n]
            return Spot(hook, (HOOK_LINES, n, 0, line), timeline.points[hook].n, n)
        return Spot(timeline.root, (HOOK_LINES, n, 0, line), len(timeline.pre) + n - num, n)

    def _need_spot(self, line: int, n: int) -> Spot:
        timeline = self.timeline
        if n < 0:
            return Spot(0, (HOOK_LINES, n, 0, line), n, n)
        if n < len(timeline.pre):
            hook = timeline.pre[n]
            done = timeline.points[hook].done
            return Spot(hook, (HOOK_LINES, done, 0, line), n, done)
        done = self.num_done_numbers + n - len(timeline.pre)
        return Spot(timeline.root, (HOOK_LINES, done, 0, line), n, done)


def needs(module: Module, kind: Kind) -> bool:
    """Whether `module` needs an op of `kind`; one that it does not need is left out."""
    if kind is Kind.ALL_GATHER:
        return Axis.SHARD in module.axes and module.resharded_after_forward
    if kind is Kind.REDUCE_SCATTER:
        return Axis.SHARD in module.axes
    if kind is Kind.ALL_REDUCE:
        return Axis.REPLICATE in module.axes
    return True


def wire_bytes(module: Module, line: OpLine) -> int:
    """Bytes that the collective of `line` takes in for `module` on one rank, in its wire dtype."""
    itemsize_bytes = ITEMSIZE_BYTES[wire_dtype(module, line)]
    if line.kind is Kind.ALL_GATHER:
        return module.gathered_bytes // ITEMSIZE_BYTES[module.gather_dtype] // module.shard_size * itemsize_bytes
    if line.kind is Kind.REDUCE_SCATTER:
        return module.reduced_numel * itemsize_bytes
    return module.reduced_numel // module.shard_size * itemsize_bytes


def wire_dtype(module: Module, line: OpLine) -> str:
    """Torch's name of the dtype in which `line` sends what belongs to `module`."""
    if line.dtype is not None:
        return WIRE_DTYPES[line.dtype]
    return module.gather_dtype if line.kind is Kind.ALL_GATHER else module.reduce_dtype


def buckets(line: OpLine, modules: list[Module], params: Mapping[str, int]) -> list[range]:
    """Which modules run as one op under the `fuse` of `line`: consecutive ranges that cover 0..len(modules)-1."""
    num_modules = len(modules)
    if line.fuse is None:
        return [range(n, n + 1) for n in range(num_modules)]
    max_modules = line.fuse.modules.resolve(params) if line.fuse.modules is not None else num_modules
    max_bytes = line.fuse.size_bytes.resolve(params) if line.fuse.size_bytes is not None else None
    first_of_tail = num_modules - line.fuse.tail.resolve(params)
    found: list[range] = []
    first, size_bytes = 0, 0
    for n, module in enumerate(modules):
        added_bytes = wire_bytes(module, line)
        joins = (
            first < n < first_of_tail
            and n - first < max_modules
            and (max_bytes is None or size_bytes + added_bytes <= max_bytes)
            and _alike(modules[n - 1], module, line)
        )
        if n and not joins:
            found.append(range(first, n))
            first, size_bytes = n, 0
        size_bytes += added_bytes
    if num_modules:
        found.append(range(first, num_modules))
    return found


def _alike(one: Module, other: Module, line: OpLine) -> bool:
    """Whether two modules may share a bucket: both need the op, in one dtype, over one mesh, scaled alike."""

    def look(module: Module) -> tuple[object, ...]:
        own = module.gather_dtype if line.kind is Kind.ALL_GATHER else (module.reduce_dtype, module.scaling)
        return needs(module, line.kind), wire_dtype(module, line), own, sorted(module.axes.items()), module.group

    return needs(one, line.kind) and look(one) == look(other)
