"""The points of a backward at which a schedule may act, from the two orders of a module table."""

from __future__ import annotations

from dataclasses import dataclass

from commplan.language.modules import ModuleTable
from commplan.ops import Section


@dataclass(frozen=True, slots=True)
class HookPoint:
    """One hook. `n` is its number in its section, `module` an index into the table (-1 for root), `done` the number of
    modules whose gradients are complete when it opens.
    """

    section: Section
    n: int
    module: int
    done: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Hooks in the order in which they open.

    Attributes:
        points: every hook; root is the last.
        completion: completion index -> index into the table, modules with something to reduce only.
        need: need index -> index into the table.
        pre: need index -> place of its pre-backward hook in `points`.
        post: completion index -> place of its post-backward hook in `points`.
        first_pre: number of completed modules v -> the first pre-backward hook that opens with at least v of them done.
    """

    points: tuple[HookPoint, ...]
    completion: tuple[int, ...]
    need: tuple[int, ...]
    pre: tuple[int, ...]
    post: tuple[int, ...]
    first_pre: tuple[int, ...]

    @property
    def root(self) -> int:
        """The place of root in `points`."""
        return len(self.points) - 1


def timeline(table: ModuleTable) -> Timeline:
    """The hooks of `table`: each module's post-backward hook in completion order, before it every pre-backward hook up to
    its own, in need order, that has not opened yet; then root.
    """
    completion, need = orders(table)
    place_in_need = {module: i for i, module in enumerate(table.need_order)}
    points: list[HookPoint] = []
    pre: list[int] = []
    post: list[int] = []
    first_pre: list[int] = []
    for n, module in enumerate(completion):
        for i in range(len(pre), place_in_need[module] + 1):
            if len(first_pre) <= n:
                first_pre.extend([len(points)] * (n + 1 - len(first_pre)))
            pre.append(len(points))
            points.append(HookPoint(Section.PRE_BACKWARD, i, table.need_order[i], n))
        post.append(len(points))
        points.append(HookPoint(Section.POST_BACKWARD, n, module, n + 1))
    points.append(HookPoint(Section.ROOT, 0, -1, len(completion)))
    return Timeline(tuple(points), completion, need, tuple(pre), tuple(post), tuple(first_pre))


def orders(table: ModuleTable) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices into the table of the modules with something to reduce, as they complete, and of those whose parameters are
    needed before the last of these is complete, as they are needed.
    """
    completion = tuple(i for i, module in enumerate(table.modules) if module.trainable)
    left = set(completion)
    last = max((i for i, module in enumerate(table.need_order) if module in left), default=-1)
    return completion, table.need_order[: last + 1]
