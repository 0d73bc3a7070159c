"""Spec x module table -> concrete ops and edges, each edge with its reason; the rules; the order."""

from commplan.graph.build import build
from commplan.graph.counts import enough_module_counts
from commplan.graph.model import Reason, Role, ScheduleGraph
from commplan.graph.rules import RULES, check

__all__ = ["RULES", "Reason", "Role", "ScheduleGraph", "build", "check", "enough_module_counts"]
