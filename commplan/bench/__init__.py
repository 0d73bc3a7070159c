"""Schedules compared on a live job: attached in turn to the model that a training script trains, and timed."""

from commplan.bench.figures import Result, Row
from commplan.bench.session import Candidate, Listener, Outcome, Settings, run

__all__ = ["Candidate", "Listener", "Outcome", "Result", "Row", "Settings", "run"]
