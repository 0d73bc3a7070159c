"""Which model a script trains: seen by its forwards and its optimizer, since nobody says."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from commplan.fsdp2.groups import root_modules


class ModelFinder:
    """Watches forwards, and knows the outermost modules that hold something sharded by `fully_shard`."""

    def __init__(self) -> None:
        self._parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._found: list[nn.Module] = []

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """A global forward pre hook. The first call of a training forward is the outermost."""
        if module in self._parts or not torch.is_grad_enabled():
            return
        parts = list(module.modules())
        if any(isinstance(part, FSDPModule) for part in parts):
            self._found = [known for known in self._found if known not in parts] + [module]
            self._parts.update(parts)

    @property
    def has_found(self) -> bool:
        """Whether any sharded model ran forward."""
        return bool(self._found)

    def model_of(self, optimizer: Optimizer, attached: Sequence[nn.Module]) -> nn.Module | None:
        """The model to measure, if it is `optimizer` that trains it.

        That is the first of those that the script attached to, else the largest that ran forward and has anything to train.
        """
        models = [*attached[:1]] or sorted(self._found, key=_size, reverse=True)[:1]
        for model in models:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(p) in owned for p in model.parameters()):
                roots = root_modules(model)
                return roots[0] if len(roots) == 1 else model
        return None


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
