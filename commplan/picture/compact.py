"""Panels as numbers and a table of strings, for the program in the page: what takes many bytes as JSON takes few this way."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from commplan.picture.panels import Bar, Panel

RESOLUTION: Final = 1e-7
"""Times are whole numbers of a unit, a power of ten, that is at most this part of the longest backward."""

Column = list[int] | dict[str, list[int]]


@dataclass
class _Table:
    """Values by the order in which they were first asked for."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def compact(panels: Sequence[Panel], sections: Sequence[int], memory_cap_bytes: int | None, top_reasons: int | None) -> str:
    """JSON of `panels`, safe to stand in a script element.

    Keys: `unit_s`; `strings`, and `sizes` in bytes, which others name by their place; `whats`: names, kinds, modules (all three
    strings) and sizes of bars; `cap`, bytes or null; and `panels`, each with `section` (its place in the report), `measured` (0
    or 1), `title`, `duration`, `peak`, `declared`, `lanes`, `memory` (a column of times, and one of sizes), `bars`, a dict of
    columns, and `why`, the reasons by the place of a bar.

    Columns of bars: `lane` (its place in `lanes`), `what`, `begin`, `ran`, `lag` (from issue to begin; -1: not known), `limit`,
    `exposed`, `hook`, `line`. A column is a list, or {"runs": [value, how often, ...]}. Those of `begin`, `what`, `limit`,
    `hook` and times of memory have each value less the one before.

    Args:
        sections: of each panel.
        top_reasons: reasons are kept of so many ops of each panel, those exposed for longest; None: of all.
    """
    unit_s = unit_of(max((panel.duration_s for panel in panels), default=0))
    strings, sizes, whats = _Table(), _Table(), _Table()
    strings("")
    packer = _Packer(unit_s, strings, sizes, whats)
    found = [packer.panel(panel, top_reasons) for panel in panels]
    data = {
        "unit_s": unit_s,
        "cap": memory_cap_bytes,
        "panels": [{"section": section} | one for section, one in zip(sections, found, strict=True)],
        "whats": list(whats.numbers),
        "strings": list(strings.numbers),
        "sizes": list(sizes.numbers),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # Nothing in a script element ends it or changes how it is read but what begins with "<".
    return text.replace("<", "\\u003c")


def unit_of(longest_s: float) -> float:
    """What times are whole numbers of, in seconds."""
    return float(10.0 ** math.floor(math.log10(longest_s * RESOLUTION))) if longest_s > 0 else RESOLUTION


@dataclass(frozen=True)
class _Packer:
    unit_s: float
    strings: _Table
    sizes: _Table
    whats: _Table

    def panel(self, panel: Panel, top_reasons: int | None) -> dict[str, Any]:
        row = {lane: at for at, lane in enumerate(panel.lanes)}
        bars, strings = panel.bars, self.strings
        begins = [self._units(bar.begin_s) for bar in bars]
        explained = {id(bar) for bar in panel.exposed[:top_reasons]}
        points = _visible((self._units(at_s), size_bytes) for at_s, size_bytes in panel.memory)
        return {
            "measured": int(panel.is_measured),
            "title": strings(panel.title),
            "duration": self._units(panel.duration_s),
            "peak": panel.told.peak_bytes,
            "declared": panel.told.declared_peak_bytes if panel.plan is None else panel.plan.peak_bytes,
            "lanes": [strings(lane) for lane in panel.lanes],
            "memory": [
                _column(_steps([at for at, _ in points])),
                _column([self.sizes(size_bytes) for _, size_bytes in points]),
            ],
            "bars": {
                "lane": _column([row[bar.lane] for bar in bars]),
                "what": _column(_steps([self._what(bar) for bar in bars])),
                "begin": _column(_steps(begins)),
                "ran": _column([max(0, self._units(bar.end_s) - begin) for bar, begin in zip(bars, begins, strict=True)]),
                "lag": _column([self._lag(bar, begin) for bar, begin in zip(bars, begins, strict=True)]),
                "limit": _column(_steps([strings(bar.limit) for bar in bars])),
                "exposed": _column([self._units(bar.exposed_s) for bar in bars]),
                "hook": _column(_steps([strings(bar.place[0]) for bar in bars])),
                "line": _column([strings(bar.place[1]) for bar in bars]),
            },
            "why": {
                index: [strings(reason) for reason in bar.reasons] for index, bar in enumerate(bars) if id(bar) in explained
            },
        }

    def _what(self, bar: Bar) -> int:
        words = (bar.name, bar.kind, _modules(bar))
        return self.whats((*map(self.strings, words), self.sizes(bar.size_bytes)))

    def _lag(self, bar: Bar, begin: int) -> int:
        return -1 if bar.issued_s is None else max(0, begin - self._units(bar.issued_s))

    def _units(self, seconds: float) -> int:
        return round(seconds / self.unit_s)


def _column(values: Sequence[int]) -> Column:
    """The shorter of two ways to write it."""
    runs = [part for value, same in groupby(values) for part in (value, len(list(same)))]
    return {"runs": runs} if len(runs) < len(values) else list(values)


def _visible(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of several points at one time the highest, and the last, which holds from then on."""
    found: list[tuple[int, int]] = []
    for at, size_bytes in points:
        if len(found) > 1 and found[-1][0] == found[-2][0] == at:
            highest = max(found[-2][1], found[-1][1])
            found[-2:] = [(at, highest)]
        found.append((at, size_bytes))
    return found


def _modules(bar: Bar) -> str:
    """`layers.3`, or `layers.3 ... layers.6 (4)`."""
    if len(bar.modules) < 2:
        return "".join(name or "(root)" for name in bar.modules)
    return f"{bar.modules[0] or '(root)'} ... {bar.modules[-1] or '(root)'} ({len(bar.modules)})"


def _steps(values: Sequence[int]) -> list[int]:
    """Each less the one before."""
    return [value - before for value, before in zip(values, [0, *values][: len(values)], strict=True)]
