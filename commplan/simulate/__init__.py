"""A backward before it runs: a plan and a cost model become a timeline, with what is exposed, why, and the memory it takes."""

from commplan.simulate.costs import Costs, OpCost
from commplan.simulate.drawing import draw
from commplan.simulate.engine import DeadlockError, Ran, Simulated, Stood, simulate
from commplan.simulate.predict import ONE_BACKWARD, Point, limits, memory, report
from commplan.simulate.pricing import costs

__all__ = [
    "ONE_BACKWARD",
    "Costs",
    "DeadlockError",
    "OpCost",
    "Point",
    "Ran",
    "Simulated",
    "Stood",
    "costs",
    "draw",
    "limits",
    "memory",
    "report",
    "simulate",
]
