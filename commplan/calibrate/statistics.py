"""Figures of many repetitions and ranks: medians, spreads, curves that rise."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_MIDDLE_HALF: Final = 2 * statistics.NormalDist().inv_cdf(0.75)
"""The middle half of a normal distribution, in standard deviations."""

NEAR: Final = 1.1
"""Sizes within such a ratio are taken for one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and between which the middle half lies; seconds."""

    median_s: float
    low_s: float
    high_s: float
    num: int

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values_s) < 2:
            return cls(values_s[0], values_s[0], values_s[0], 1)
        low_s, _, high_s = statistics.quantiles(values_s, n=4, method="inclusive")
        return cls(statistics.median(values_s), low_s, high_s, len(values_s))

    @classmethod
    def middle(cls, spreads: Sequence[Spread]) -> Spread:
        """Of what several ranks measured, the middle one's, figure by figure."""
        figures = zip(*((one.median_s, one.low_s, one.high_s) for one in spreads), strict=True)
        median_s, low_s, high_s = map(statistics.median, figures)
        return cls(median_s, low_s, high_s, spreads[0].num)

    @property
    def jitter(self) -> float:
        """Standard deviation over mean, of a normal distribution whose middle half is as wide."""
        return (self.high_s - self.low_s) / _MIDDLE_HALF / self.median_s if self.median_s > 0 else 0.0

    def __str__(self) -> str:
        half = "one value" if self.num == 1 else f"{in_ms(self.low_s)} to {in_ms(self.high_s)} ms the middle half of {self.num}"
        return f"{in_ms(self.median_s)} ms, {half}"


def in_ms(seconds: float) -> str:
    """Milliseconds in three digits."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def rising(values: Sequence[float]) -> list[float]:
    """The sequence that never falls and is nearest to `values` by squares: neighbours that fall share their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, num = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / num:
            before, num_before = blocks.pop()
            total, num = total + before, num + num_before
        blocks.append((total, num))
    return [total / num for total, num in blocks for _ in range(num)]


def rising_line(points: Sequence[tuple[int, float]]) -> tuple[list[tuple[int, float]], list[list[int]]]:
    """Points by ascending size, made to rise, that can be gone on with beyond the last; of which of the given ones each is.

    A line that is flat at its end would say that more takes no longer: where measured times fall, what is known of the last
    ones is their mean, at the mean of their sizes.  Sizes that are within a tenth are told apart by chance, and are one.
    """
    of: list[list[int]] = []
    for place, (size, _) in enumerate(points):
        if of and size <= NEAR * points[of[-1][0]][0]:
            of[-1].append(place)
        else:
            of.append([place])
    line = [(round(statistics.fmean(points[i][0] for i in at)), statistics.fmean(points[i][1] for i in at)) for at in of]
    curve = rising([seconds for _, seconds in line])
    tail = curve.index(curve[-1])
    if 0 < tail < len(curve) - 1:
        line[tail:] = [(round(statistics.fmean(size for size, _ in line[tail:])), curve[-1])]
        of[tail:] = [[place for at in of[tail:] for place in at]]
    return [(size, seconds) for (size, _), seconds in zip(line, curve[: len(line)], strict=True)], of


def slowest_group(by_rank: Iterable[tuple[str, Sequence[float]]]) -> Spread:
    """What one collective takes, from what each rank saw of each repetition.

    Args:
        by_rank: for each rank the name of its process group, and seconds from its own arrival to its own end, repetition by
            repetition, on its own clock.

    Of the ranks of a group the shortest time counts in each repetition.  What every rank gets depends on what every rank
    gave, so nobody is through before the last one has come: times of those who came earlier contain their waiting for it, and
    the last one's own does not, which is the shortest if all end alike.  Where they end apart the shortest is too short by
    no more than that, and that is why several in a row are measured as one.  Clocks need not agree.  Of groups the slowest
    counts, since a schedule waits for all of them.
    """
    groups: dict[str, list[Sequence[float]]] = {}
    for group, seconds in by_rank:
        groups.setdefault(group, []).append(seconds)
    spreads = [Spread.of([min(of_one) for of_one in zip(*ranks, strict=True)]) for ranks in groups.values()]
    return max(spreads, key=lambda spread: spread.median_s)


def slowdown(alone_s: float, beside_s: float, hidden_s: Mapping[str, float], any_hidden_s: float) -> float:
    """How much longer a second of compute takes while there is a transfer on a link, the same for each of `hidden_s`.

    Args:
        alone_s, beside_s: the same compute without communication, and with.
        hidden_s: of `beside_s`, how long each link was in use; together `any_hidden_s`.

    With a slowdown s, compute gets on by 1 / (1 + s) where one link is in use, by 1 / (1 + 2 s) where two are.
    """
    busy_s = min(any_hidden_s, beside_s)
    both_s = max(0.0, min(sum(hidden_s.values()) - any_hidden_s, busy_s))
    if beside_s <= alone_s or busy_s <= 0:
        return 0.0

    def done_s(s: float) -> float:
        return beside_s - busy_s + (busy_s - both_s) / (1 + s) + both_s / (1 + 2 * s)

    low, high = 0.0, _MOST
    if done_s(high) >= alone_s:
        return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if done_s(middle) > alone_s else (low, middle)
    return (low + high) / 2


_MOST = 100.0
"""A slowdown beyond which nothing is told apart."""
