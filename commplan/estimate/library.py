"""The presets that come with commplan."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commplan.language.presets import ModelPreset, NodePreset, load_preset

MODELS: Final = Path(__file__).parent / "presets" / "models"
NODES: Final = Path(__file__).parent / "presets" / "nodes"


def find_model(name: str) -> ModelPreset:
    """The model of this name, or in the YAML file of this path.

    Raises:
        CommplanError: see `load_preset`.
    """
    return load_preset(name, ModelPreset, MODELS)


def find_node(name: str) -> NodePreset:
    """The node of this name, or in the YAML file of this path.

    Raises:
        CommplanError: see `load_preset`.
    """
    return load_preset(name, NodePreset, NODES)
