"""Spec x module table -> concrete ops and edges, each edge with its reason; the rules; the order."""

from commplan.graph.build import build
from commplan.graph.counts import MAX_WORK, enough_module_counts, landmarks, settled_module_count, work_of
from commplan.graph.model import Reason, Role, ScheduleGraph
from commplan.graph.rules import RULES, check, check_ranks

__all__ = [
    "MAX_WORK",
    "RULES",
    "Reason",
    "Role",
    "ScheduleGraph",
    "build",
    "check",
    "check_ranks",
    "enough_module_counts",
    "landmarks",
    "settled_module_count",
    "work_of",
]
