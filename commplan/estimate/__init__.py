"""Analytic profiles, for planning before anything can be measured: sizes of a model and figures of nodes in, a profile out."""

from commplan.estimate.draft import Estimate, Job, estimate
from commplan.estimate.library import MODELS, NODES, find_model, find_node
from commplan.language.presets import preset_names

__all__ = ["MODELS", "NODES", "Estimate", "Job", "estimate", "find_model", "find_node", "preset_names"]
