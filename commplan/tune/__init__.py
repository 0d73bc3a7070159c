"""Looks for the schedule that is fastest for a job, by simulation: `Search`."""

from commplan.tune.candidates import CHOICES, ROOT, Candidate
from commplan.tune.search import Found, Goal, NothingFitsError, Search

__all__ = ["CHOICES", "ROOT", "Candidate", "Found", "Goal", "NothingFitsError", "Search"]
