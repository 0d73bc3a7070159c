"""What can go wrong, as data: places in a file, violations of rules, and the exceptions that carry them.

Exceptions carry records; wording for a terminal happens in the command line.  Users' mistakes are `ValueError`s, faults of
a running job are `RuntimeError`s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Severity(StrEnum):
    """Whether a violation stops the schedule from being used."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A place in a text file: 1-based `line` and `column`, `length` in characters, and the line itself as `text`."""

    file: str
    line: int
    column: int
    length: int = 1
    text: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Related:
    """A second place that a violation is about, and why."""

    message: str
    span: Span


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: what is wrong, where, and (`hint`) what to write instead."""

    code: str
    message: str
    span: Span
    hint: str = ""
    severity: Severity = Severity.ERROR
    related: tuple[Related, ...] = ()

    def __str__(self) -> str:
        return f"{self.span}: {self.code} {self.message}"


@dataclass(frozen=True, slots=True)
class Rule:
    """The documentation entry of a rule: what `commplan explain CODE` prints.

    `wrong` and `right` are whole schedules (YAML text): the smallest that breaks the rule, and its mending.
    """

    code: str
    title: str
    severity: Severity
    what: str
    why: str
    wrong: str
    right: str


def sort_violations(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """Violations by place, then code; exact repetitions are dropped."""
    unique = dict.fromkeys(violations)
    return tuple(sorted(unique, key=lambda v: (v.span, v.code, v.message)))


class CommplanError(ValueError):
    """A mistake that the user can mend: in a schedule, a module table, a parameter or a call."""


class ScheduleError(CommplanError):
    """A schedule breaks rules; `violations` holds every one of them, by place."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = sort_violations(violations)
        lines = [f"{v}" + (f" ({v.hint})" if v.hint else "") for v in self.violations]
        super().__init__("\n".join(lines))


class PlanError(CommplanError):
    """A saved plan is not valid; `problems` says everything that is wrong with it."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("not a valid plan: " + "; ".join(self.problems))


class AttachError(CommplanError):
    """A model can't be driven by a schedule; it was left as it was."""


class RankMismatchError(AttachError):
    """Ranks disagree on schedule, parameters, torch or module table; no rank attached."""


class ExecutionError(RuntimeError):
    """A backward under a schedule could not be finished; gradients of this step must not be used."""


class CollectiveTimeoutError(ExecutionError):
    """A collective did not end in time; names the op, the module and the group."""


class DivergenceError(ExecutionError):
    """Ranks ran different ops, or reduced different gradients, in one backward."""
