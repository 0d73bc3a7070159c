"""The stages in order: schedule -> spec -> graph -> rules -> plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from commplan import graph, language, plan
from commplan.errors import CommplanError, Rule, ScheduleError, Severity, Span, Violation, sort_violations
from commplan.language.modules import ModuleTable
from commplan.language.spec import ScheduleSpec
from commplan.plan import Plan

Schedule = str | Path | ScheduleSpec

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {rule.code: rule for rule in sorted((*language.RULES, *graph.RULES), key=lambda rule: rule.code)}
)
"""Every rule by its code."""

MAX_SINGLE_PARAMS: Final = 8
"""More params than this are not taken to their bounds one at a time."""

_DOUBTFUL: Final = ("CP101", "CP102", "CP103")
"""Where a line breaks one of these for some number of modules, that it orders too little for another is no news."""


def compile(schedule: Schedule, modules: Any, **params: int) -> Plan:  # noqa: A001 - named for what it does
    """Compile `schedule` for a model.

    `schedule` is a name of the library, a path, YAML text or a parsed schedule; `modules` is a number of equal modules, a
    module table (also as a path, JSON text or plain data), or a sharded model; `params` override those of the schedule.

    Raises:
        ScheduleError: the schedule breaks rules; the error holds every finding that is an error.
        CommplanError: a param, the module table or the model is not usable.
    """
    spec = language.resolve(schedule)
    found, made = _checked(spec, module_table(modules), language.bind_params(spec, params))
    errors = [violation for violation in found if violation.severity is Severity.ERROR]
    if errors:
        raise ScheduleError(errors)
    return plan.lower(made)


def check(schedule: Schedule, modules: Any | None = None, params: Mapping[str, int] | None = None) -> tuple[Violation, ...]:
    """Every finding, errors and warnings, by place; `schedule`, `modules` and `params` as in `compile`.

    Without `modules` the schedule is checked for every number of modules that can make a difference; params that are not
    given are checked at their default and at their bounds.

    Raises:
        CommplanError: a param or the module table is not usable.
    """
    try:
        spec = language.resolve(schedule)
    except ScheduleError as error:
        return error.violations
    given = dict(params or {})
    tables = None if modules is None else [module_table(modules)]
    found: dict[tuple[str, Span, tuple[Span, ...]], Violation] = {}
    for binding in bindings(spec, given):
        for table in tables or map(ModuleTable.uniform, graph.enough_module_counts(spec, binding)):
            for violation in _checked(spec, table, binding)[0]:
                key = (violation.code, violation.span, tuple(related.span for related in violation.related))
                found.setdefault(key, violation)
    in_doubt = {violation.span.line for violation in found.values() if violation.code in _DOUBTFUL}
    return sort_violations(v for v in found.values() if v.code != "CP201" or v.span.line not in in_doubt)


def _checked(
    spec: ScheduleSpec, table: ModuleTable, params: Mapping[str, int]
) -> tuple[tuple[Violation, ...], graph.ScheduleGraph]:
    made = graph.build(spec, table, params)
    return sort_violations((*language.warnings(spec), *graph.check(made))), made


def module_table(modules: Any) -> ModuleTable:
    """The module table that `modules` stands for: a number, a table, a path, JSON text, plain data or a sharded model.

    Raises:
        CommplanError: it stands for none.
    """
    if isinstance(modules, ModuleTable):
        return modules
    if isinstance(modules, int) and not isinstance(modules, bool):
        if modules < 1:
            raise CommplanError(f"the number of modules must be at least 1, not {modules}")
        return ModuleTable.uniform(modules)
    if isinstance(modules, Mapping):
        return language.validate_table(modules, "<modules>")
    if isinstance(modules, str) and modules.lstrip().startswith("{"):
        return language.parse_table(modules, "<modules>")
    if isinstance(modules, str | Path):
        return language.load_table(modules)
    if not hasattr(modules, "named_modules"):
        raise CommplanError(f"modules must be a number, a module table or a sharded model, not {modules!r}")
    from commplan.fsdp2 import describe

    return describe(modules)


def bindings(spec: ScheduleSpec, given: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The values of params to check: all at their default, then (if they are few) one at a time at each bound, then all at
    each bound.
    """
    bound = language.bind_params(spec, given)
    free = [param for param in spec.params if param.name not in given]
    lowest = {param.name: param.minimum for param in free}
    highest = {param.name: param.maximum for param in free if param.maximum is not None}
    seen: set[tuple[int, ...]] = set()
    single = [{name: value} for bounds in (lowest, highest) for name, value in bounds.items()]
    if len(free) > MAX_SINGLE_PARAMS:
        single = []
    for change in ({}, *single, lowest, highest):
        binding = bound | change
        if tuple(binding.values()) not in seen:
            seen.add(tuple(binding.values()))
            yield binding
