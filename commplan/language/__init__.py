"""The language: YAML text to a frozen `ScheduleSpec`, JSON to a `ModuleTable`, or every violation with its place."""

from commplan.language import library
from commplan.language.binding import bind_params
from commplan.language.library import resolve
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.language.parsing import examine, load, parse, warnings
from commplan.language.refs import parse_index, parse_ref
from commplan.language.rules import RULES
from commplan.language.spec import ScheduleSpec
from commplan.language.tables import load_table, parse_table, validate_table

__all__ = [
    "RULES",
    "Module",
    "ModuleTable",
    "Parameter",
    "ScheduleSpec",
    "bind_params",
    "examine",
    "library",
    "load",
    "load_table",
    "parse",
    "parse_index",
    "parse_ref",
    "parse_table",
    "resolve",
    "validate_table",
    "warnings",
]
