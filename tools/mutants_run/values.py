"""Symbolic gradients: for each rank, the parts that it holds and which contributions each of them sums up."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

Axes = tuple[str, ...]
Part = tuple[int, tuple[tuple[tuple[int, int], int], ...]]
"""Which part of the gradient, and how often each (rank, backward) is in its sum."""
Value = tuple[tuple[Part, ...], ...]
"""Parts by rank; () is garbage."""

GARBAGE: Value = ()
SIZE = 2


@cache
def groups(axes: Axes, axis: str) -> tuple[tuple[int, ...], ...]:
    """For each rank, the ranks of its group over `axis`, in order. Ranks are laid out row by row over `axes`."""
    ranks = list(product(range(SIZE), repeat=len(axes)))
    at = axes.index(axis)
    return tuple(
        tuple(i for i, other in enumerate(ranks) if other[:at] + other[at + 1 :] == rank[:at] + rank[at + 1 :])
        for rank in ranks
    )


def num_parts(axes: Axes) -> int:
    """Parts of a whole gradient."""
    return SIZE if "shard" in axes else 1


@cache
def computed(axes: Axes, backward: int) -> Value:
    """What backward leaves: every part, with the rank's own contribution."""
    ranks = range(SIZE ** len(axes))
    return tuple(tuple((part, (((rank, backward), 1),)) for part in range(num_parts(axes))) for rank in ranks)


@cache
def wanted(axes: Axes, num_backwards: int) -> Value:
    """What `.grad` has to be: the rank's own part, with the contributions of all."""
    ranks = list(product(range(SIZE), repeat=len(axes)))
    everything = tuple(((rank, backward), 1) for rank in range(len(ranks)) for backward in range(num_backwards))
    own = [rank[axes.index("shard")] if "shard" in axes else 0 for rank in ranks]
    return tuple(((part, everything),) for part in own)


@cache
def parameters(axes: Axes, *, whole: bool) -> Value:
    """Parameters, gathered or not; they have no contributions."""
    shards = tuple(((part[0][0], ()),) for part in wanted(axes, 0))
    return tuple(tuple((part, ()) for part in range(num_parts(axes))) for _ in shards) if whole else shards


@cache
def add(one: Value, other: Value) -> Value:
    """The sum, rank by rank and part by part."""
    if len(one) != len(other):
        return GARBAGE
    sums = [_add((a, b)) for a, b in zip(one, other, strict=True)]
    return GARBAGE if None in sums else tuple(s for s in sums if s is not None)


def _add(terms: tuple[tuple[Part, ...], ...]) -> tuple[Part, ...] | None:
    """The sum of what several ranks hold; None where they hold different parts."""
    labels = {tuple(label for label, _ in term) for term in terms}
    if len(labels) > 1:
        return None
    found = []
    for label, *columns in zip(labels.pop(), *terms, strict=True):
        total: Counter[tuple[int, int]] = Counter()
        for _, contributions in columns:
            total.update(dict(contributions))
        found.append((label, tuple(sorted(total.items()))))
    return tuple(found)


@cache
def collective(kind: str, value: Value, axes: Axes, axis: str) -> Value:
    """What a collective over `axis` makes of `value`."""
    if not value or axis not in axes:
        return GARBAGE
    found = []
    for rank, group in enumerate(groups(axes, axis)):
        held = tuple(value[other] for other in group)
        if kind == "all_gather":
            result: tuple[Part, ...] | None = tuple(part for parts in held for part in parts)
        elif kind == "all_reduce":
            result = _add(held)
        else:
            length, rest = divmod(len(held[0]), SIZE)
            first = group.index(rank) * length
            result = _add(tuple(parts[first : first + length] for parts in held)) if length and not rest else None
        if result is None:
            return GARBAGE
        found.append(result)
    return tuple(found)
