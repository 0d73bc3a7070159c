"""The stages in order: schedule -> spec -> graph -> rules -> plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from commplan import graph, language, plan
from commplan.errors import CommplanError, Rule, ScheduleError, Severity, Span, Violation, sort_violations
from commplan.language.modules import ModuleTable
from commplan.language.source import alternatives
from commplan.language.spec import Param, ScheduleSpec
from commplan.language.uses import uses
from commplan.ops import Axis, Section
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

MAX_NAMED_RANKS: Final = 4

USUAL_MODULES: Final = 64
"""Module tables beyond this size are checked for as many params, in more time."""

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
    found = _findings(spec, given, list(distinct.values()), memory_cap_bytes, _numbers(keys))
    if _has_errors(violation for violation in found if violation.code not in _OF_ONE_RANK):
        return sort_violations(found)
    between: dict[_Key, Violation] = {}
    for binding in _affordable(spec, given, sum(map(len, distinct.values()))):
        graphs = {key: graph.build(spec, table, binding) for key, table in distinct.items()}
        for violation in graph.check_ranks((graphs[key] for key in keys), in_flight):
            between.setdefault(_key(violation), violation)
    return sort_violations((*found, *between.values()))


_Key = tuple[str, Span, tuple[Span, ...]]


def _key(violation: Violation) -> _Key:
    """What one finding is told by from another, whatever modules and params it was found with."""
    return violation.code, violation.span, tuple(related.span for related in violation.related)


def _numbers(keys: Sequence[str]) -> list[list[int]]:
    """For each distinct key, where it stands."""
    found: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    return list(found.values())


def _findings(
    spec: ScheduleSpec,
    given: Mapping[str, int],
    tables: Sequence[ModuleTable],
    memory_cap_bytes: int | None,
    ranks: Sequence[Sequence[int]] = (),
) -> list[Violation]:
    """Every finding for each of `tables` (each that of some `ranks`, if there are several); without any, for every number of
    modules. Warnings are for params as they are by default: a bound is there to be chosen for a reason.
    """
    found: dict[_Key, Violation] = {}
    main = language.bind_params(spec, given)
    for binding, table in _layouts(spec, given, tables):
        for violation in _checked(spec, table, binding, all_pieces=False)[0]:
            if binding == main or violation.severity is Severity.ERROR:
                found.setdefault(_key(violation), violation)
    in_doubt = {violation.span.line for violation in found.values() if violation.code in _DOUBTFUL}
    kept = [v for v in found.values() if v.code != "CP201" or v.span.line not in in_doubt]
    over = [] if memory_cap_bytes is None else _over_cap(spec, main, tables, memory_cap_bytes, ranks)
    growth = _growth(spec, main, tables, of_shards=memory_cap_bytes is not None and not over)
    return [*kept, *over, *growth]


def _layouts(
    spec: ScheduleSpec, given: Mapping[str, int], tables: Sequence[ModuleTable]
) -> Iterator[tuple[dict[str, int], ModuleTable]]:
    """What a schedule is checked with: bindings of params and module tables."""
    if tables:
        for binding in _affordable(spec, given, sum(map(len, tables))):
            yield from ((binding, table) for table in tables)
    else:
        for binding, counts in module_counts(spec, given):
            yield from ((binding, ModuleTable.uniform(count)) for count in counts)


def _affordable(spec: ScheduleSpec, given: Mapping[str, int], num_modules: int) -> Iterator[dict[str, int]]:
    """The bindings of params that there is time for with so many modules; the first one in any case."""
    left = graph.MAX_WORK * -(-num_modules // USUAL_MODULES)
    for number, binding in enumerate(bindings(spec, given)):
        left -= graph.work_of(spec, binding, [num_modules])
        if number and left < 0:
            return
        yield binding


def module_counts(spec: ScheduleSpec, given: Mapping[str, int]) -> Iterator[tuple[dict[str, int], tuple[int, ...]]]:
    """Each binding of params with the numbers of modules to check it with: half of the work for the first, and equal parts of
    what is left for each of the others, until nothing is.
    """
    left = graph.MAX_WORK
    every = list(bindings(spec, given))
    for number, binding in enumerate(every):
        if number and not left:
            return
        counts = graph.enough_module_counts(spec, binding, left // (len(every) - number if number else min(2, len(every))))
        left -= min(left, graph.work_of(spec, binding, counts))
        yield binding, counts


def _over_cap(
    spec: ScheduleSpec,
    params: Mapping[str, int],
    tables: Sequence[ModuleTable],
    cap_bytes: int,
    ranks: Sequence[Sequence[int]],
) -> list[Violation]:
    """What is wrong with the plan that takes the most memory, if that is over the cap; it names the ranks that are."""
    over: list[tuple[int, int, Violation]] = []
    for number, table in enumerate(tables):
        found, made = _checked(spec, table, params)
        if not _has_errors(found):
            lowered = plan.lower(made)
            over += ((lowered.peak_bytes, number, violation) for violation in plan.check(lowered, cap_bytes))
    if not over:
        return []
    _, worst, violation = max(over, key=lambda item: item[0])
    if not ranks:
        return [violation]
    others = sorted(rank for _, number, _ in over if number != worst for rank in ranks[number])
    more = f" ({_named(others)} {'are' if len(others) > 1 else 'is'} over it too)" if others else ""
    where = "every rank" if len(ranks) == 1 else _named(ranks[worst])
    return [replace(violation, message=f"on {where} {violation.message}{more}")]


def _named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 1`; of many the first ones."""
    shown = [str(rank) for rank in ranks[:MAX_NAMED_RANKS]]
    shown += [f"{len(ranks) - len(shown)} more"] * (len(ranks) > len(shown))
    return f"rank{'s' * (len(ranks) > 1)} {alternatives(shown, 'and')}"


def _growth(
    spec: ScheduleSpec, params: Mapping[str, int], tables: Sequence[ModuleTable], *, of_shards: bool
) -> Iterator[Violation]:
    """What the plan of a schedule keeps of every module."""
    count = graph.settled_module_count(spec, params)
    if count is None:
        return
    used = {axis for table in tables for module in table.modules for axis in module.axes} if tables else set(Axis)
    sizes = {axis.value: 2 if axis in used else None for axis in Axis}
    found, made = _checked(spec, ModuleTable.uniform(count, **sizes), params)
    if not _has_errors(found):
        yield from plan.check_growth(plan.lower(made), of_shards=of_shards)


def _has_errors(found: Iterable[Violation]) -> bool:
    return any(violation.severity is Severity.ERROR for violation in found)


def _checked(
    spec: ScheduleSpec, table: ModuleTable, params: Mapping[str, int], *, all_pieces: bool = True
) -> tuple[tuple[Violation, ...], graph.ScheduleGraph]:
    made = graph.build(spec, table, params, all_pieces=all_pieces)
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
    bound, and one at a time at the values between: every one, or those near a distance in the schedule. A param that no line
    uses makes no difference.
    """
    bound = language.bind_params(spec, given)
    used = {use.param for section in Section for use in uses(spec.lines(section))}
    free = [param for param in spec.params if param.name not in given and param.name in used]
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
