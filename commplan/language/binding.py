"""Params of a schedule, bound to the values of one run."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from commplan.errors import CommplanError
from commplan.language.source import did_you_mean, shown
from commplan.language.spec import Param, ScheduleSpec
from commplan.language.uses import uses
from commplan.ops import Section


def bind_params(spec: ScheduleSpec, overrides: Mapping[str, int]) -> dict[str, int]:
    """Every param of the schedule with its value, in the order of the file: that of `overrides`, or else its default.

    Raises:
        CommplanError: naming each override that is no param of the schedule, no integer or out of its bounds.
    """
    by_name = {param.name: param for param in spec.params}
    limits = _limits(spec)
    values = {name: param.default for name, param in by_name.items()}
    faults = []
    for name, given in overrides.items():
        if name not in by_name:
            faults.append(_unknown(str(name), spec))
            continue
        try:
            values[name] = operator.index(given)
        except TypeError:
            faults.append(f"param {name}: expected an integer, not {shown(str(given))}")
            continue
        if isinstance(given, bool):
            faults.append(f"param {name}: expected an integer, not {given}")
        elif fault := _out_of_bounds(by_name[name], values[name], limits.get(name)):
            faults.append(fault)
    if faults:
        raise CommplanError(f"schedule {spec.name}: " + "; ".join(faults))
    return values


def _limits(spec: ScheduleSpec) -> dict[str, int]:
    """The most that each param may be where it is used."""
    limits: dict[str, int] = {}
    for use in uses(line for section in Section for line in spec.lines(section)):
        limits[use.param] = min(limits.get(use.param, use.allowed.most), use.allowed.most)
    return limits


def _unknown(name: str, spec: ScheduleSpec) -> str:
    if not spec.params:
        return f"it has no params, so no {shown(name)}"
    return f"it has no param {shown(name)}: {did_you_mean(name, [param.name for param in spec.params])}"


def _out_of_bounds(param: Param, value: int, limit: int | None) -> str:
    bounds = [bound for bound in (param.maximum, limit) if bound is not None]
    most = min(bounds, default=None)
    if value >= param.minimum and (most is None or value <= most):
        return ""
    allowed = f"at least {param.minimum}" if most is None else f"{param.minimum} to {most}"
    digits = str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
    return f"param {param.name}: expected {allowed}, not {digits}"
