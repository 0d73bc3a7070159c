"""Simulated backwards as text: a line for compute and one for each lane, all to one scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from commplan.ops import COMPUTE_LANE, Kind
from commplan.plan.model import OpStep
from commplan.simulate.engine import Ran, Simulated

IDLE = "."
LEGEND = "digits: the module's number, its last digit; letters: all-gathers, a for module 0; x: apply; ~: packing"


def draw(simulated: Sequence[Simulated], columns: int) -> Iterator[str]:
    """Lines of at most `columns` characters. Each shows what took most of its time; where compute stands still it is blank."""
    longest_s = max((one.duration_s for one in simulated), default=0)
    lanes = {lane for one in simulated for lane in _lanes(one)}
    margin = max(map(len, (COMPUTE_LANE, *lanes))) + 2
    cell_s = longest_s / max(columns - margin, 1)
    for one in simulated:
        yield f"{one.plan.schedule}: {one.duration_s * 1e3:.1f} ms"
        cells = round(one.duration_s / cell_s) if cell_s else 0
        for lane in (COMPUTE_LANE, *_lanes(one)):
            ran = [r for r in chain(one.compute, one.ops) if r.lane == lane]
            row = _row(
                ((r.begin_s, r.end_s, _symbol(one, r)) for r in ran), cells, cell_s, " " if lane == COMPUTE_LANE else IDLE
            )
            yield f"{lane:{margin}}{row}".rstrip()
        yield ""
    yield LEGEND


def _lanes(simulated: Simulated) -> list[str]:
    return [lane.name for lane in simulated.plan.lanes if lane.name != COMPUTE_LANE]


def _symbol(simulated: Simulated, ran: Ran) -> str:
    if ran.op is None:
        return str(ran.module % 10) if ran.module >= 0 else "~"
    step = simulated.plan.steps[ran.number]
    assert isinstance(step, OpStep)
    if step.kind is Kind.APPLY:
        return "x"
    return chr(ord("a") + ran.op.first % 26) if step.kind is Kind.ALL_GATHER else str(ran.op.first % 10)


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
