"""Issues one op of a backward: its task goes to its lane, behind its waits and behind what ranks have to agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch
import torch.distributed as dist

from commplan.execute.backward import Backward
from commplan.execute.collectives import TASKS, Call, placeholder
from commplan.execute.control import Control, Message
from commplan.execute.instance import Instance
from commplan.execute.lanes import Lanes, Task, Token
from commplan.execute.program import Action
from commplan.execute.ranges import WAIT, GroupRanks, Range
from commplan.execute.store import Store
from commplan.ops import COMPUTE_LANE, WIRE_DTYPES, Kind
from commplan.plan.model import OpStep

_DTYPES: Final[Mapping[str | None, torch.dtype | None]] = MappingProxyType(
    {None: None, **{name: getattr(torch, name) for name in WIRE_DTYPES.values()}}
)


class Issuer:
    """Issues ops, whether at their places in the plan or outside of them.

    Args:
        store: what ops leave for later ones.
        control: lets ranks agree on the parameters of each reduction before it begins; None where they need not.
        make_range: makes the ranges that a profiler shows around each wait of compute.
    """

    def __init__(self, lanes: Lanes, store: Store, control: Control | None, make_range: Range) -> None:
        self._lanes = lanes
        self._store = store
        self._control = control
        self._make_range = make_range
        self._group_ranks = GroupRanks()

    def wait(self, tokens: Sequence[Token], why: str = "") -> None:
        """Let compute wait for `tokens`."""
        if tokens:
            with self._make_range(WAIT):
                self._lanes.wait(tokens, why)

    def issue(self, backward: Backward, step: OpStep, action: Action, waits: Sequence[Token]) -> None:
        """Issue the step of `action`, at its place in the plan, for those of its modules that are there."""
        if step.kind is Kind.ALL_GATHER:
            token = self._submit(backward, step, backward.gathers.prepare(step), waits)
            backward.gathers.issued(step.op, token)
            return
        live = backward.live
        instances = [live[module] for module in action.members if module in live]
        self._reduce(backward, Call(step, instances, _DTYPES[step.dtype], action.makes_copy), waits, action.text)

    def issue_alone(self, backward: Backward, step: OpStep, module: int, instance: Instance, waits: Sequence[Token]) -> None:
        """Issue the op of `step` outside of the plan, for one module and in one piece."""
        if len(step.op.members) > 1 or step.op.pieces > 1:
            step = replace(step, op=replace(step.op, first=module, last=module, piece=0, pieces=1))
        self._reduce(backward, Call(step, [instance], _DTYPES[step.dtype]), waits)

    def _reduce(self, backward: Backward, call: Call, waits: Sequence[Token], why: str = "") -> None:
        task = TASKS[call.step.kind](call, self._store) if call.instances else None
        if task is not None and task.is_communication:
            task = self._after_agreement(backward, task, call.instances)
        if call.step.lane == COMPUTE_LANE:
            self.wait(waits, why)
            if task is not None:
                with task.around():
                    task.start()
                    task.finish()
                for instance in call.instances:
                    instance.write()
            token = backward.tokens[call.op] = self._lanes.mark()
        else:
            token = self._submit(backward, call.step, task, waits)
        for instance in call.instances:
            instance.last = token

    def _submit(self, backward: Backward, step: OpStep, task: Task | None, waits: Sequence[Token]) -> Token:
        if task is not None and task.process_group is not None:
            backward.ranks_of[task.op] = self._group_ranks.of(task.process_group)
        token = self._lanes.submit(step.lane, task or placeholder(step.op), waits)
        backward.tokens[step.op] = token
        return token

    def _after_agreement(self, backward: Backward, task: Task, instances: Sequence[Instance]) -> Task:
        """`task`, which begins when all ranks reduce the same parameters, if it is the first collective of a reduction."""
        if self._control is None:
            return task
        fresh = [instance for instance in instances if not instance.is_agreed]
        for instance in fresh:
            instance.is_agreed = True
        if not fresh:
            return task
        told = [f"backward {backward.number}, {task.op} of {i.unit.name}: {i.in_words()}" for i in fresh]
        check = self._control.begin(Message.REDUCTION, told, before=str(task))

        def start() -> dist.Work | None:
            check.wait()
            return task.start()

        return replace(task, start=start)
