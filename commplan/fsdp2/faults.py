"""What may go wrong beside the collectives of a plan.

Backwards that raise or lose their end, steps taken all the same, all-gathers that never end, parameters that were exchanged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from commplan.errors import AttachError, CollectiveTimeoutError, ExecutionError
from commplan.execute.executor import Executor
from commplan.execute.waiting import wait_in_slices
from commplan.fsdp2 import torch_faults as faults
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.groups import Group
from commplan.sight.report import fsdp2_gather

logger = logging.getLogger("commplan")

# `model.zero_grad` would not reach the sharded parameters of modules that an exception left gathered.
RECOVERY = "call zero_grad of the optimizer (or set every .grad to None), and run the step again from its first forward"


class Interruptions:
    """Notices backwards and forwards that did not end, and says when it is safe to go on.

    Args:
        groups: of the model.
        roots: states with no sharded module above them.
    """

    def __init__(self, executor: Executor, groups: Sequence[Group], roots: Sequence[private.State]) -> None:
        self._executor = executor
        self._groups = groups
        self._roots = roots
        self._ends: dict[int, faults.BackwardEnd] = {}
        self._has_forward_raised = False
        self._is_told = False
        self._lost = ""

    def queue_callback(self, state: private.State, original: Callable[[], None]) -> None:
        """FSDP2 asks for its final callback, as it does when a backward begins and every time a module is reached."""
        end = self._ends.get(faults.context_of(state))
        if private.has_queued_callback(state):
            if end is not None and end.has_raised:
                raise ExecutionError(
                    f"a backward begins, but an earlier one raised with {self._pending()} still to run, and no forward came "
                    f"since; {RECOVERY}"
                )
            original()
            return
        original()
        self._ends[faults.context_of(state)] = faults.BackwardEnd(self._executor.rhythm.break_off)

    @property
    def backward_is_unfinished(self) -> bool:
        """Whether a backward began and did not reach root; FSDP2 may know of one that raised before it came to any group."""
        return self._executor.in_backward or any(private.has_queued_callback(root) for root in self._roots)

    @property
    def is_unfinished(self) -> bool:
        """Whether there is anything to forget: such a backward, or a forward that raised."""
        return self.backward_is_unfinished or self._has_forward_raised

    def forget(self) -> None:
        """Drop what did not end, here and in FSDP2, with all that was accumulated for the same step."""
        self._executor.abort()
        for root in self._roots:
            if not private.is_inner(root):
                private.reset_iteration(root)
        self._ends.clear()
        self._has_forward_raised = False
        self._is_told = False

    def reset(self, original: Callable[[], None]) -> None:
        """The user calls FSDP2's `reset_iter_state`, which drops what was accumulated, whole or in partial sums."""
        lost = f"a backward raised with {self._pending()} still to run" if self.backward_is_unfinished else ""
        original()
        self.forget()
        self._lost = lost or self._lost

    def after_forward(self, root: private.State) -> None:
        """A forward of a root ended, or raised; then FSDP2 forgets it at once, so that `model.parameters` are sharded ones."""
        if faults.is_in_forward(root) and not private.is_inner(root):
            self._has_forward_raised = True
            faults.reshard(root)

    def before_forward(self, root: private.State) -> None:
        """A forward of a root begins.

        Raises:
            ExecutionError: gradients are incomplete and nothing shows that they were dropped.
        """
        # Not everything that ends a forward lets hooks run.
        self.after_forward(root)
        if self.is_unfinished:
            self._drop()
        if self._lost and torch.is_grad_enabled():
            if any(faults.has_gradients(group.raw) for group in self._groups):
                raise ExecutionError(f"{self._lost}, and .grad still holds gradients of that step; {RECOVERY}")
            self._lost = ""

    def before_step(self) -> None:
        """An optimizer is about to use the model's gradients.

        Raises:
            ExecutionError: they are incomplete.
        """
        if self.backward_is_unfinished:
            self._is_told = True
            raise ExecutionError(
                f"optimizer.step() after a backward that did not end: {self._pending()} still to run, so gradients are "
                f"incomplete; {RECOVERY}"
            )
        if self._lost and any(faults.has_gradients(group.raw) for group in self._groups):
            raise ExecutionError(f"{self._lost}, and .grad still holds gradients of that step; {RECOVERY}")

    @property
    def has_lost(self) -> bool:
        """Whether gradients were dropped, and `.grad` not looked at since."""
        return bool(self._lost)

    def _drop(self) -> None:
        pending = self._pending()
        in_backward = self.backward_is_unfinished
        has_raised = any(end.has_raised for end in self._ends.values())
        is_told = self._is_told
        held = self._executor.holds_partial_sums or any(faults.holds_whole_gradients(root) for root in self._roots)
        self.forget()
        if in_backward and not has_raised and not is_told:
            raise ExecutionError(
                f"a backward ended without its root, with {pending} still to run: FSDP2's final callback never came, as with "
                f"an autograd engine of one's own. What it had begun was dropped; {RECOVERY}"
            )
        if in_backward:
            self._lost = f"a backward {'raised' if has_raised else 'ended'} with {pending} still to run"
            logger.warning("%s; its gradients, and what was accumulated before it, are dropped", self._lost)
        elif held:
            self._lost = "a forward raised after backwards that only accumulated"
            logger.warning("%s; what they accumulated is dropped", self._lost)

    def _pending(self) -> str:
        return ", ".join(self._executor.pending_ops()) or "no op of a complete module"


def holds_parameters_of(optimizer: Optimizer, groups: Sequence[Group]) -> bool:
    """Whether the optimizer steps any parameter of these groups."""
    of_model = {id(p) for group in groups for p in faults.faces(group.raw)}
    return any(id(p) in of_model for of_optimizer in optimizer.param_groups for p in of_optimizer["params"])


def refuse_alterations(groups: Sequence[Group], facts: Sequence[Sequence[private.ParamFacts]]) -> None:
    """Check that parameters are those that were attached to.

    Raises:
        AttachError: names the first one that is not.
    """
    for group, of_group in zip(groups, facts, strict=True):
        for alteration in faults.alterations(group.raw, group.parameter_names, of_group):
            raise AttachError(
                f"{alteration}, since the schedule was attached: detach before such a change (model.to, an assignment), "
                "and attach after it"
            )


class GatherPatience:
    """Waits for FSDP2's all-gathers as long as for a plan's collectives, where it is the host that waits."""

    def __init__(self, executor: Executor, timeout_s: float, fail: Callable[[ExecutionError], ExecutionError]) -> None:
        self._executor = executor
        self._timeout_s = timeout_s
        self._fail = fail

    def wait(self, name: str, group: dist.ProcessGroup | None, work: dist.Work) -> None:
        """Wait for the all-gather of the module `name`.

        Raises:
            ExecutionError: it failed, took longer than the timeout, or a lane failed meanwhile.
        """
        if work.is_completed():
            work.wait()
            return
        self._executor.rhythm.hand_over()
        ranks = "" if group is None else f" on the group of ranks {dist.get_process_group_ranks(group)}"
        op = f"AG of module {name!r}{ranks}"
        begin_s = time.perf_counter()
        self._executor.health.host_wait = (op, begin_s)
        try:
            is_over = wait_in_slices(work, self._timeout_s, lambda: self._executor.health.failure is not None)
        except RuntimeError as error:
            raise self._fail(ExecutionError(f"{op} failed: {error}")) from error
        finally:
            self._executor.health.host_wait = None
            if private.in_autograd():
                self._executor.host_waits.add(fsdp2_gather(name), begin_s, time.perf_counter())
        if not is_over:
            elapsed_s = time.perf_counter() - begin_s
            late = CollectiveTimeoutError(f"{op} did not end within {elapsed_s:.1f} s: a rank of that group did not reach it.")
            raise self._fail(self._executor.health.failure or late)
