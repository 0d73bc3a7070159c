"""Issues one op of a backward: its task goes to its lane, behind its waits and behind what ranks have to agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from commplan.execute.backward import Backward
from commplan.execute.collectives import TASKS, Store, placeholder
from commplan.execute.control import Control, Message
from commplan.execute.instance import Instance
from commplan.execute.lanes import Lanes, Task, Token
from commplan.execute.ranges import WAIT, GroupRanks, Range
from commplan.ops import COMPUTE_LANE
from commplan.plan.model import OpStep


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
        with self._make_range(WAIT):
            self._lanes.wait(tokens, why)

    def issue(self, backward: Backward, step: OpStep, instance: Instance | None, waits: Sequence[Token], why: str = "") -> None:
        """Issue the op of `step` behind `waits`; without `instance` it merely takes its place in its lane."""
        task = None if instance is None else TASKS[step.kind](step.op, instance, self._store)
        if task is not None and task.process_group is not None:
            backward.ranks_of[task.op] = self._group_ranks.of(task.process_group)
        if task is not None and instance is not None and task.is_communication and not instance.is_agreed:
            task = self._after_agreement(backward, task, instance)
        if step.lane == COMPUTE_LANE:
            self.wait(waits, why)
            if task is not None and instance is not None:
                with task.around():
                    task.start()
                    task.finish()
                instance.write()
            token = self._lanes.mark()
        else:
            token = self._lanes.submit(step.lane, task or placeholder(step.op), waits)
        backward.tokens[step.op] = token
        if instance is not None:
            instance.last = token

    def _after_agreement(self, backward: Backward, task: Task, instance: Instance) -> Task:
        """`task`, the first collective of a reduction, which begins when all ranks reduce the same parameters."""
        instance.is_agreed = True
        if self._control is None:
            return task
        head = f"backward {backward.number}, {task.op} of {instance.unit.name}"
        check = self._control.begin(Message.REDUCTION, (f"{head}: {instance.in_words()}",), before=str(task))

        def start() -> dist.Work | None:
            check.wait()
            return task.start()

        return replace(task, start=start)
