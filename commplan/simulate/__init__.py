"""A backward before it runs: a plan and a cost model become a timeline, with what is exposed, why, and the memory it takes."""

from commplan.simulate.costs import Costs, OpCost
from commplan.simulate.drawing import draw
from commplan.simulate.engine import DeadlockError, Ran, Simulated, Stood, simulate
from commplan.simulate.jitter import Draws, drawn, draws
from commplan.simulate.predict import Point, limits, memory, report
from commplan.simulate.pricing import compute_alone, costs

__all__ = [
    "Costs",
    "DeadlockError",
    "Draws",
    "OpCost",
    "Point",
    "Ran",
    "Simulated",
    "Stood",
    "compute_alone",
    "costs",
    "draw",
    "drawn",
    "draws",
    "limits",
    "memory",
    "report",
    "simulate",
]
