"""The oracle's verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mutants_run import reading, run, steps
from mutants_run.layout import Layout
from mutants_run.world import World, Wrong


def schedule_fault(data: Mapping[str, Any], params: Mapping[str, int], world: World) -> str:
    """Why a schedule, as plain data, is wrong for a world; "" if it is right."""
    try:
        run.check(Layout(reading.read(data, params), world).items(), world, queues=True)
    except Wrong as fault:
        return str(fault)
    return ""


def plan_fault(data: Mapping[str, Any], world: World) -> str:
    """Why a plan, as plain data, is wrong; "" if it is right."""
    try:
        run.check(steps.items(data, world), world, queues=False)
    except Wrong as fault:
        return str(fault)
    return ""
