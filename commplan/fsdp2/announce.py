"""What `attach` says to people: a line in the log, and warnings about an environment in which nothing can overlap."""

from __future__ import annotations

import logging
import os
import warnings

import torch

from commplan.execute.environment import obstacles, shortage_of_cores
from commplan.ops import COMPUTE_LANE
from commplan.plan.model import Plan

logger = logging.getLogger("commplan")


def warn_of_obstacles(device: torch.device) -> None:
    """A `RuntimeWarning` at the caller of attach for each setting of the environment that defeats overlap on `device`."""
    for obstacle in obstacles(device.type, os.environ):
        warnings.warn(obstacle, RuntimeWarning, stacklevel=3)


def log_attached(plan: Plan, device: torch.device) -> None:
    """Say what was attached."""
    logger.info("attached %s", in_words(plan))
    lanes = [lane for lane in plan.lanes if lane.name != COMPUTE_LANE]
    if device.type == "cpu" and (shortage := shortage_of_cores(len(lanes), os.environ)):
        logger.info("%s", shortage)


def log_recompiled(plan: Plan) -> None:
    """Say that modules ran in another order than the plan's."""
    logger.info("modules run in another order than the plan's; compiled %s", in_words(plan))


def in_words(plan: Plan) -> str:
    """A plan in one line of a log."""
    params = "".join(f" {name}={value}" for name, value in plan.params)
    lanes = ", ".join(lane.name for lane in plan.lanes)
    return (
        f"{plan.schedule}{params}, plan {plan.digest[:12]}: {len(plan.modules.modules)} modules, lanes {lanes}, "
        f"{plan.peak_bytes:,} bytes of communication memory at most"
    )


class LastBackwardWatch:
    """Notices a training loop that never says which backward is the last of a step, under a schedule that asks for it."""

    def __init__(self, schedule: str) -> None:
        self._schedule = schedule
        self._num_since_step = 0
        self._is_quiet = False

    def backward(self, *, is_last: bool) -> None:
        """A backward begins."""
        self._num_since_step += 1
        if not is_last:
            self._is_quiet = True
        elif self._num_since_step > 1 and not self._is_quiet:
            self._is_quiet = True
            logger.warning(
                "schedule %s does less in backwards that are not the last of their step, but all were said to be last: call "
                "model.set_is_last_backward(False) before the forward of the others",
                self._schedule,
            )

    def step(self) -> None:
        """An optimizer takes the gradients."""
        self._num_since_step = 0
