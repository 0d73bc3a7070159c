"""A script that attaches a schedule itself: under a measurement its call only says which one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from commplan import compiler, fsdp2
from commplan.errors import ExecutionError
from commplan.fsdp2.attachment import Attachment, Options, RankChecks
from commplan.fsdp2.groups import describe
from commplan.fsdp2.unit import FsdpUnit
from commplan.language import resolve
from commplan.language.spec import ScheduleSpec
from commplan.plan.model import Plan
from commplan.sight.figures import Report
from commplan.sight.report import BackwardReport


class HeldAttachment(Attachment):
    """What `attach` returns to a script that is measured: shows whichever schedule is attached at the time.

    Attributes:
        model, spec, params, options: what the script called `attach` with.
        current: what is attached; None while stock FSDP2 runs.
    """

    def __init__(self, model: nn.Module, spec: ScheduleSpec, params: dict[str, int], options: Options) -> None:
        self.model = model
        self.spec = spec
        self.params = params
        self.options = options
        self.current: Attachment | None = None
        self._asked_for = compiler.compile(spec, describe(model), **params)

    @property
    def plan(self) -> Plan:
        """The plan in use; while stock FSDP2 runs, that of the script's schedule."""
        return self._asked_for if self.current is None else self.current.plan

    @property
    def units(self) -> Sequence[FsdpUnit]:
        """Of the schedule that is attached; none under stock FSDP2."""
        return () if self.current is None else self.current.units

    @property
    def last_backward(self) -> BackwardReport | None:
        """Of the schedule that is attached; None under stock FSDP2."""
        return None if self.current is None else self.current.last_backward

    def save_run(self, path: str | Path) -> None:
        """As ever.

        Raises:
            ExecutionError: also while stock FSDP2 runs.
        """
        if self.current is None:
            raise ExecutionError("save_run() while a measurement runs stock FSDP2: call it where last_backward is not None")
        self.current.save_run(path)

    def report(self, *, local: bool = False, timeout_s: float = 60.0) -> Report:
        """As ever.

        Raises:
            ExecutionError: also while stock FSDP2 runs.
        """
        if self.current is None:
            raise ExecutionError(
                "report() while a measurement runs stock FSDP2, of which there is none: take it out of the script, or call "
                "it only where last_backward is not None"
            )
        return self.current.report(local=local, timeout_s=timeout_s)

    def detach(self) -> None:
        """Nothing: the measurement attaches and detaches."""


@contextmanager
def holding(held: list[HeldAttachment]) -> Iterator[None]:
    """Inside, `commplan.attach` attaches nothing, and puts what it was called with into `held`."""

    def attach(
        model: nn.Module,
        schedule: str | Path | ScheduleSpec,
        *,
        options: Options | None = None,
        rank_checks: RankChecks | None = None,
        **params: int,
    ) -> Attachment:
        options = options or Options()
        if rank_checks is not None:
            options = replace(options, rank_checks=rank_checks)
        made = HeldAttachment(model, resolve(schedule), params, options)
        held.append(made)
        return made

    names = vars(fsdp2)
    original = names["attach"]
    names["attach"] = attach
    try:
        yield
    finally:
        names["attach"] = original
