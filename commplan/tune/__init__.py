"""Looks for the schedule that is fastest for a job, by simulation: `Search`."""

from commplan.tune.candidates import CHOICES, ROOT, Candidate
from commplan.tune.search import NEARLY, Found, Goal, NothingFitsError, Search

__all__ = ["CHOICES", "NEARLY", "ROOT", "Candidate", "Found", "Goal", "NothingFitsError", "Search"]
