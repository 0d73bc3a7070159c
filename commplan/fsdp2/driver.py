"""Hooks FSDP2's backward up to the executor: who begins, who is complete, when root is, in which order modules run."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from commplan.errors import ExecutionError
from commplan.execute.executor import Executor
from commplan.fsdp2 import torch_devices, torch_gradients, torch_parameters
from commplan.fsdp2 import torch_faults as faults
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.announce import LastBackwardWatch
from commplan.fsdp2.faults import GatherPatience, Interruptions, holds_parameters_of, refuse_alterations
from commplan.fsdp2.groups import Group, Orders, root_modules
from commplan.fsdp2.torch_unshard import Unshard
from commplan.fsdp2.unit import FsdpUnit
from commplan.plan.model import Plan

Recompile = Callable[[Sequence[Group], Orders], Plan]
"""Groups, and the orders that forwards showed -> the plan for them, once every rank has found the same."""


class ForwardRecord:
    """In which order modules ran since the last backward. Knows each once, so it does not grow."""

    def __init__(self) -> None:
        self._begun: dict[int, bool] = {}
        self._ended: dict[int, None] = {}

    def begin(self, group: int, *, is_hooked: bool) -> None:
        """A forward of `group` begins; `is_hooked`: autograd will tell when its gradients are complete."""
        self._begun.setdefault(group, is_hooked)

    def end(self, group: int) -> None:
        """A forward of `group` ends."""
        self._ended.pop(group, None)
        self._ended[group] = None

    def take(self) -> Orders:
        """The orders that backward will have, then forget them.

        Gradients are complete in the reverse of the order in which forwards first began (AccumulateGrad waits for every
        use); groups that autograd does not tell about come last.
        """
        begun = list(reversed(self._begun.items()))
        hooked = [group for group, is_hooked in begun if is_hooked]
        told_last = [group for group, is_hooked in begun if not is_hooked]
        orders = Orders((*hooked, *told_last), tuple(reversed(self._ended)))
        self._begun.clear()
        self._ended.clear()
        return orders


class Driver:
    """Connects one model to one executor.

    Args:
        groups, units: the model's parameter groups and their units, by the same index.
        orders: those that the executor's plan was compiled for.
        timeout_s: how long the host waits for an all-gather of FSDP2's.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        units: Sequence[FsdpUnit],
        orders: Orders,
        executor: Executor,
        recompile: Recompile,
        timeout_s: float,
    ) -> None:
        self.executor = executor
        self._groups = list(groups)
        self.units = units
        self._recompile = recompile
        self._record = ForwardRecord()
        self._offloaded = [group.raw for group in groups if torch_devices.is_offloaded(group.raw)]
        self._replacements = private.Replacements()
        self._handles: list[RemovableHandle] = []
        self._roots: list[private.State] = []
        self._gathers = faults.WatchedAllGathers()
        self._unshards = [Unshard(group.raw, unit.parameters) for group, unit in zip(groups, units, strict=True)]
        self._facts = [private.param_facts(group.raw) for group in groups]
        # A thread that is in torch when Python ends would abort the process.
        self._at_exit = _weakly(executor.outlast_threads)
        self._interruptions = Interruptions(executor, groups, self._roots)
        self._timeout_s = timeout_s
        self._last_backwards = LastBackwardWatch(executor.plan.schedule)
        self._no_grads_on_failure = _OnFailure(self._drop_grads)
        self._use(orders)

    def install(self, model: nn.Module) -> None:
        """Replace the methods and register the hooks."""
        root_set = set(root_modules(model))
        inside: set[int] = set()
        for _, state in private.states(model):
            # Any state's may be the one that FSDP2 queues, the root's only as a rule.
            self._replace(state, private.FINAL_CALLBACK, self._final_callback)
            # Only FSDP2's own pre-backward calls it, under its guard from torch.compile.
            queue_callback = getattr(state, faults.QUEUES_CALLBACK)
            self._replacements.make(state, faults.QUEUES_CALLBACK, partial(self._queue_callback, state, queue_callback))
            if faults.resets_iterations():
                self._replace(state, faults.RESETS_ITERATION, self._reset_iteration)
            if root_set.intersection(private.modules(state)):
                self._roots.append(state)
            pre_backward = getattr(state, private.STATE_PRE_BACKWARD)
            if private.STATE_PRE_BACKWARD not in vars(state) and private.is_guarded(pre_backward):
                # FSDP2 makes its guard anew at each call.
                once = private.as_hook(private.STATE_PRE_BACKWARD, private.without_guard(pre_backward))
                self._replacements.make(state, private.STATE_PRE_BACKWARD, once)
                inside.update(map(id, private.groups(state)))
        for index, group in enumerate(self._groups):
            self._replace(group.raw, "pre_forward", partial(self._pre_forward, index))
            self._replace(group.raw, "post_forward", partial(self._post_forward, index))
            self._replace(group.raw, "pre_backward", partial(self._pre_backward, index), is_inside=id(group.raw) in inside)
            self._replace(group.raw, "post_backward", partial(self._post_backward, index))
            self._unshards[index].install(self._replacements)
        patience = GatherPatience(self.executor, self._timeout_s, self._fail)
        # The host may come to wait for one some time after it began.
        limit = timedelta(seconds=2 * self._timeout_s)
        for group in self._groups:
            if group.raw.device.type == "cpu":
                wait = partial(patience.wait, group.name, private.mesh_facts(group.raw).shard)
                self._gathers.watch(group.raw, wait, limit)
        self._handles.append(register_optimizer_step_pre_hook(_weakly(self._before_step)))
        atexit.register(self._at_exit)
        for module in root_set:
            root = private.state_of(cast(Any, module))
            before = private.without_dynamo(partial(self._before_forward, root))
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            after = private.without_dynamo(partial(self._after_forward, root))
            self._handles.append(module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Put everything back, and end the executor. Partial sums go back to FSDP2.

        Raises:
            ExecutionError: in mid-backward, or where FSDP2 could not go on with partial sums; nothing was done.
        """
        if private.in_autograd():
            raise ExecutionError("detach was called inside a backward; call it when backward has returned")
        is_whole = self.executor.health.failure is None and not self._interruptions.is_unfinished
        if is_whole and self.executor.holds_foreign_sums:
            raise ExecutionError(
                "detach was called between microbatches under a schedule that sends fp16: FSDP2 would divide partial sums "
                "again; call it after the last microbatch of a step"
            )
        atexit.unregister(self._at_exit)
        while self._handles:
            self._handles.pop().remove()
        self._replacements.undo()
        self._gathers.undo()
        if self._interruptions.is_unfinished:
            self._interruptions.forget()
        for unit, partial_sum in self.executor.take_partial_sums().items():
            if isinstance(unit, FsdpUnit):
                torch_gradients.give_partial_sum(unit.raw, partial_sum.buffer)
        self.executor.close()

    def _replace(self, owner: object, name: str, wrapper: Callable[..., Any], *, is_inside: bool = False) -> None:
        """Let `owner.name(...)` be `wrapper(original, ...)`; torch.compile and type checks treat it as FSDP2's own."""
        original = private.without_guard(getattr(owner, name))
        self._replacements.make(owner, name, private.as_hook(name, partial(wrapper, original), is_inside=is_inside))

    def _use(self, orders: Orders) -> None:
        self._orders = orders
        self._place = {group: n for n, group in enumerate(orders.completion)}
        self._need_place = {group: n for n, group in enumerate(orders.need)}
        self._frozen = [i for i in range(len(self._groups)) if i not in self._place]

    # What takes the place of FSDP2's methods; `original` is FSDP2's own.

    def _pre_forward(
        self,
        index: int,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.executor.gathers and self.executor.in_backward and private.in_autograd():
            # A forward that is run again: parameters are needed now, not when backward of the module begins.
            self._need(index)
        args, kwargs = original(module, args, kwargs)
        if torch.is_grad_enabled() and not private.in_autograd():
            self._record.begin(index, is_hooked=private.registers_post_backward(args, kwargs))
        return args, kwargs

    def _post_forward(self, index: int, original: Callable[..., Any], *args: Any) -> Any:
        output = original(*args)
        if torch.is_grad_enabled() and not private.in_autograd():
            self._record.end(index)
        return output

    def _pre_backward(self, index: int, original: Callable[..., Any], *args: Any) -> None:
        if torch.is_grad_enabled():
            raise ExecutionError("create_graph=True is not supported: gradients under a schedule have no graph of their own")
        self._enter()
        self._need(index)
        if not self.executor.gathers:
            self._unshards[index].pre_backward(original, *args)
        elif not torch_parameters.begin_backward(self._groups[index].raw):
            # FSDP2's first argument asks for its own prefetch of what comes next.
            original(False, *args[1:])
        self.executor.rhythm.hand_over()

    def _need(self, index: int) -> None:
        place = self._need_place.get(index)
        if place is not None and self.executor.acts_before(place):
            with self._no_grads_on_failure:
                self.executor.pre_backward(place)

    def _post_backward(self, index: int, original: Callable[..., Any], *args: Any) -> None:
        self._enter()
        rhythm = self.executor.rhythm
        rhythm.enter(index)
        try:
            self._complete(index)
        finally:
            rhythm.leave(index)

    def _complete(self, index: int) -> None:
        unit, place = self.units[index], self._place.get(index)
        keeps = place is not None and self.executor.keeps_whole(place)
        gradients = unit.take_gradients(keeps=keeps)
        with self._no_grads_on_failure:
            if gradients is not None:
                self.executor.complete(self._place[index], gradients)
            elif place is not None and keeps and (kept_bytes := unit.kept_bytes):
                self.executor.keep(place, kept_bytes)

    def _drop_grads(self) -> None:
        for group in self._groups:
            torch_gradients.drop_grads(group.raw)

    def _fail(self, error: ExecutionError) -> ExecutionError:
        self._drop_grads()
        return self.executor.health.fail(error)

    def _queue_callback(self, state: private.State, original: Callable[..., Any]) -> None:
        self._interruptions.queue_callback(state, original)

    def _final_callback(self, original: Callable[..., Any]) -> None:
        self._enter()
        with self.executor.collecting():
            for index, group in enumerate(self._groups):
                if torch_gradients.has_leftover(group.raw):
                    self._complete(index)
            original()
        if any(private.has_queued_callback(root) for root in self._roots):
            return
        self.executor.rhythm.break_off()
        with self._no_grads_on_failure:
            self.executor.root()
        for raw in self._offloaded:
            torch_devices.finish_copies(raw)

    def _reset_iteration(self, original: Callable[..., Any]) -> None:
        self.executor.health.raise_failure()
        self._record.take()
        self._interruptions.reset(original)

    def _before_forward(self, root: private.State, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Refuse to go on after what can't be mended, forget what can."""
        self.executor.health.raise_failure()
        if private.in_autograd():
            return
        self.executor.host_waits.clear()
        with self._no_grads_on_failure, self.executor.health.failing():
            self.executor.health.settle(waits=False)
        if self._interruptions.is_unfinished:
            self._record.take()
        self._interruptions.before_forward(root)
        if torch.is_grad_enabled():
            refuse_alterations(self._groups, self._facts)

    def _after_forward(self, root: private.State, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not private.in_autograd():
            self._interruptions.after_forward(root)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """No optimizer may take gradients that are incomplete. One that steps inside a backward knows what it does."""
        if self.executor.accumulates and holds_parameters_of(optimizer, self._groups):
            self._last_backwards.step()
        is_suspicious = self.executor.is_suspicious or self._interruptions.has_lost
        if not is_suspicious and not self._interruptions.backward_is_unfinished:
            return
        if private.in_autograd() or not holds_parameters_of(optimizer, self._groups):
            return
        self.executor.health.raise_failure()
        with self._no_grads_on_failure, self.executor.health.failing():
            self.executor.health.settle(waits=True)
        self._interruptions.before_step()

    # Orders.

    def _enter(self) -> None:
        """Begin a backward, if none is under way, with the plan that fits the forwards before it."""
        if self.executor.in_backward:
            return
        for root in self._roots:
            if private.is_inner(root):
                raise ExecutionError("a part of a sharded model was attached to, whose root is outside it: attach to the whole")
        for group in self._groups:
            for refusal in private.refusals(group.raw):
                raise ExecutionError(f"module {group.name!r} {refusal}")
        known = self._groups
        seen = self._record.take()
        orders = self._merge(seen)
        if orders != self._orders or self._groups != known:
            plan = self._recompile(self._groups, orders)
            self.executor.set_plan(plan, [self.units[i] for i in orders.completion])
            self._use(orders)
        is_last = private.is_last_backward(self._roots)
        if self.executor.accumulates:
            self._last_backwards.backward(is_last=is_last)
        wanted = {self._need_place[index] for index in seen.need if index in self._need_place}
        self.executor.begin(is_last=is_last, wanted=wanted)

    def _merge(self, seen: Orders) -> Orders:
        """The orders in use, as long as what forwards showed fits into them; else what they showed, and the rest behind."""
        self._groups = [group.with_thawed() for group in self._groups]
        thawed = tuple(i for i in self._frozen if self._groups[i].is_trainable)
        known = (*self._orders.completion, *thawed)
        completion = _fit(known, [i for i in seen.completion if i in self._place or i in thawed])
        need = (*self._orders.need, *thawed)
        if self.executor.has_pre_backward_hooks:
            need = _fit(need, [i for i in seen.need if i in self._place or i in thawed])
        return Orders(completion, need)


class _OnFailure:
    """Where some gradients are incomplete or mixed, no optimizer may take any of them: drops them, and raises on."""

    def __init__(self, drop_grads: Callable[[], None]) -> None:
        self._drop_grads = drop_grads

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, ExecutionError):
            self._drop_grads()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls `method` as long as its object lives: a hook of the whole process must not keep a model alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


def _fit(known: tuple[int, ...], seen: Sequence[int]) -> tuple[int, ...]:
    """`known` if `seen` is a part of it in the same order; else `seen`, and then those of `known` that were not seen."""
    rest = iter(known)
    if all(index in rest for index in seen):
        return known
    return (*seen, *(index for index in known if index not in seen))
