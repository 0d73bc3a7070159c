"""The stages in order: schedule -> spec -> graph -> rules -> plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from commplan import graph, language, plan
from commplan.errors import CommplanError, Rule, ScheduleError, Severity, Span, Violation, sort_violations
from commplan.language.modules import ModuleTable
from commplan.language.spec import Param, ScheduleSpec
from commplan.ops import Axis
from commplan.plan import Plan

Schedule = str | Path | ScheduleSpec

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {rule.code: rule for rule in sorted((*language.RULES, *graph.RULES, *plan.RULES), key=lambda rule: rule.code)}
)
"""Every rule by its code."""

MAX_SINGLE_PARAMS: Final = 8
"""More params than this are not taken to other values one at a time."""

MAX_VALUES: Final = 16
"""A param with more values than this is checked at its bounds and near the distances that the schedule has."""

_OF_ONE_RANK: Final = ("CP401",)
"""Errors that leave a plan which can be compared with those of other ranks."""

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


def check(
    schedule: Schedule,
    modules: Any | None = None,
    params: Mapping[str, int] | None = None,
    *,
    memory_cap_bytes: int | None = None,
) -> tuple[Violation, ...]:
    """Every finding, errors and warnings, by place; `schedule`, `modules` and `params` as in `compile`.

    Without `modules` the schedule is checked for every number of modules that can make a difference; params that are not
    given are checked at their default and, for errors, at their bounds.  `memory_cap_bytes` is the most communication memory
    that one rank has, with params at their default.

    Raises:
        CommplanError: a param or the module table is not usable, or there is a cap and no `modules`.
    """
    if modules is None and memory_cap_bytes is not None:
        raise CommplanError("a memory cap says nothing without modules: give their number or a module table too")
    try:
        spec = language.resolve(schedule)
    except ScheduleError as error:
        return error.violations
    tables = [] if modules is None else [module_table(modules)]
    return sort_violations(_findings(spec, dict(params or {}), tables, memory_cap_bytes))


def check_ranks(
    schedule: Schedule,
    tables: Iterable[Any],
    params: Mapping[str, int] | None = None,
    *,
    in_flight: int = 1,
    memory_cap_bytes: int | None = None,
) -> tuple[Violation, ...]:
    """Every finding of `check` for the modules of each rank, and those between ranks: collectives that differ, deadlocks.

    `tables` are in the order of ranks, each as `modules` in `compile`.  If they are as many as the largest mesh has ranks,
    these are laid out row by row over (replicate, shard); if not, all are taken to share their groups.  `in_flight` is how
    many collectives a rank can surely have issued and not over at once; 1 is a thread that blocks in each.

    Raises:
        CommplanError: a param or a module table is not usable, or there is no table.
    """
    if in_flight < 1:
        raise CommplanError(f"at least 1 collective is in flight, not {in_flight}")
    try:
        spec = language.resolve(schedule)
    except ScheduleError as error:
        return error.violations
    given = dict(params or {})
    ranks = [module_table(table) for table in tables]
    if not ranks:
        raise CommplanError("there is no module table: give one for each rank")
    keys = [table.model_dump_json() for table in ranks]
    distinct = dict(zip(keys, ranks, strict=True))
    found = _findings(spec, given, list(distinct.values()), memory_cap_bytes)
    if _has_errors(violation for violation in found if violation.code not in _OF_ONE_RANK):
        return sort_violations(found)
    between: dict[_Key, Violation] = {}
    for binding in bindings(spec, given):
        graphs = {key: graph.build(spec, table, binding) for key, table in distinct.items()}
        for violation in graph.check_ranks((graphs[key] for key in keys), in_flight):
            between.setdefault(_key(violation), violation)
    return sort_violations((*found, *between.values()))


_Key = tuple[str, Span, tuple[Span, ...]]


def _key(violation: Violation) -> _Key:
    """What one finding is told by from another, whatever modules and params it was found with."""
    return violation.code, violation.span, tuple(related.span for related in violation.related)


def _findings(
    spec: ScheduleSpec, given: Mapping[str, int], tables: Sequence[ModuleTable], memory_cap_bytes: int | None
) -> list[Violation]:
    """Every finding for each of `tables`; without any, for every number of modules. Warnings are for params as they are by
    default: a bound is there to be chosen for a reason.
    """
    found: dict[_Key, Violation] = {}
    main = language.bind_params(spec, given)
    for binding, counts in module_counts(spec, given):
        for table in tables or map(ModuleTable.uniform, counts):
            for violation in _checked(spec, table, binding)[0]:
                if binding == main or violation.severity is Severity.ERROR:
                    found.setdefault(_key(violation), violation)
    in_doubt = {violation.span.line for violation in found.values() if violation.code in _DOUBTFUL}
    kept = [v for v in found.values() if v.code != "CP201" or v.span.line not in in_doubt]
    return kept + list(_memory(spec, main, tables, memory_cap_bytes))


def module_counts(spec: ScheduleSpec, given: Mapping[str, int]) -> Iterator[tuple[dict[str, int], tuple[int, ...]]]:
    """Each binding of params with the numbers of modules to check it with: half of the work for the first, and equal parts of
    what is left for each of the others.
    """
    left = graph.MAX_WORK
    every = list(bindings(spec, given))
    for number, binding in enumerate(every):
        counts = graph.enough_module_counts(spec, binding, left // (len(every) - number if number else min(2, len(every))))
        left -= min(left, graph.work_of(spec, binding, counts))
        yield binding, counts


def _memory(
    spec: ScheduleSpec, params: Mapping[str, int], tables: Sequence[ModuleTable], cap_bytes: int | None
) -> Iterator[Violation]:
    """What the plans of a schedule keep in memory, where it has any."""
    exceeds = False
    for table in tables if cap_bytes is not None else ():
        found, made = _checked(spec, table, params)
        if cap_bytes is not None and not _has_errors(found):
            over = plan.check(plan.lower(made), cap_bytes)
            exceeds = exceeds or bool(over)
            yield from over
    count = graph.settled_module_count(spec, params)
    if count is None:
        return
    used = {axis for table in tables for module in table.modules for axis in module.axes} if tables else set(Axis)
    sizes = {axis.value: 2 if axis in used else None for axis in Axis}
    found, made = _checked(spec, ModuleTable.uniform(count, **sizes), params)
    if not _has_errors(found):
        yield from plan.check_growth(plan.lower(made), of_shards=cap_bytes is not None and not exceeds)


def _has_errors(found: Iterable[Violation]) -> bool:
    return any(violation.severity is Severity.ERROR for violation in found)


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
    """The values of params to check: all at their default, then (if they are few) one at a time at each bound, all at each
    bound, and one at a time at the values between: every one, or those near a distance in the schedule.
    """
    bound = language.bind_params(spec, given)
    free = [param for param in spec.params if param.name not in given]
    lowest = {param.name: param.minimum for param in free}
    highest = {param.name: param.maximum for param in free if param.maximum is not None}
    seen: set[tuple[int, ...]] = set()
    single = [{name: value} for bounds in (lowest, highest) for name, value in bounds.items()]
    near = graph.landmarks(spec, bound)
    between = [{param.name: value} for param in free for value in _values(param, near)]
    if len(free) > MAX_SINGLE_PARAMS:
        single, between = [], []
    for change in ({}, *single, lowest, highest, *between):
        binding = bound | change
        if tuple(binding.values()) not in seen:
            seen.add(tuple(binding.values()))
            yield binding


def _values(param: Param, near: Iterable[int]) -> Iterator[int]:
    """Values of `param` within its bounds: all of them if they are few, else those that are in `near`."""
    if param.maximum is not None and param.maximum - param.minimum < MAX_VALUES:
        yield from range(param.minimum, param.maximum + 1)
    else:
        yield from (v for v in sorted(near) if param.minimum <= v and (param.maximum is None or v <= param.maximum))
