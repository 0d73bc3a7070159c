"""Simulated backwards as text: a line for compute and one for each lane, all to one scale."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from commplan.graph.timeline import orders
from commplan.ops import COMPUTE_LANE, Kind
from commplan.plan.model import OpStep
from commplan.simulate.engine import Ran, Simulated

IDLE = "."
LEGEND = (
    "digits: the place of a module among those that have gradients, its last digit (# for others); letters: its all-gather, a "
    "for the first; x: apply; ~: packing"
)


def draw(simulated: Sequence[Simulated], columns: int) -> Iterator[str]:
    """Lines of at most `columns` characters, 20 or more. Each shows what took most of its time; where compute stands still it
    is blank.
    """
    longest_s = max((one.duration_s for one in simulated), default=0)
    lanes = {lane for one in simulated for lane in _lanes(one)}
    margin = min(max(map(len, (COMPUTE_LANE, *lanes))) + 2, columns // 2)
    cell_s = longest_s / (columns - margin)
    for one in simulated:
        yield f"{one.plan.schedule}: {one.duration_s * 1e3:.1f} ms"[:columns]
        cells = round(one.duration_s / cell_s) if cell_s else 0
        symbol_of = _symbols(one)
        for lane in (COMPUTE_LANE, *_lanes(one)):
            spans = ((r.begin_s, r.end_s, symbol_of(r)) for r in chain(one.compute, one.ops) if r.lane == lane)
            row = _row(spans, cells, cell_s, " " if lane == COMPUTE_LANE else IDLE)
            yield f"{lane[: margin - 2]:{margin}}{row}".rstrip()
        yield ""
    yield from textwrap.wrap(LEGEND, columns)


def _lanes(simulated: Simulated) -> list[str]:
    return [lane.name for lane in simulated.plan.lanes if lane.name != COMPUTE_LANE]


def _symbols(simulated: Simulated) -> Callable[[Ran], str]:
    """Tells the character of what ran."""
    completion, need = orders(simulated.plan.modules)
    place = {index: n for n, index in enumerate(completion)}
    steps = simulated.plan.steps

    def symbol(ran: Ran) -> str:
        if ran.op is None:
            return "~" if ran.module < 0 else str(place[ran.module] % 10) if ran.module in place else "#"
        step = steps[ran.number]
        assert isinstance(step, OpStep)
        if step.kind is Kind.APPLY:
            return "x"
        if step.kind is not Kind.ALL_GATHER:
            return str(ran.op.first % 10)
        gathered = need[ran.op.first]
        return chr(ord("a") + place[gathered] % 26) if gathered in place else "#"

    return symbol


def _row(spans: Iterable[tuple[float, float, str]], cells: int, cell_s: float, idle: str) -> str:
    """What covers most of each cell; nothing does if it is idle for longer."""
    most: list[tuple[float, str]] = [(0.0, idle)] * cells
    busy_s = [0.0] * cells
    for begin_s, end_s, symbol in spans:
        for at in range(int(begin_s / cell_s), min(cells, int(end_s / cell_s) + 1)):
            covered_s = min(end_s, (at + 1) * cell_s) - max(begin_s, at * cell_s)
            busy_s[at] += max(covered_s, 0)
            if covered_s > most[at][0]:
                most[at] = covered_s, symbol
    # Several short ones together keep a cell busy, though each of them is shorter than what is idle.
    return "".join(symbol if 2 * busy >= cell_s else idle for (_, symbol), busy in zip(most, busy_s, strict=True))
