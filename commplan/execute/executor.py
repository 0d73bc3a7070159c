"""Runs a plan beside one backward after another: a loop over hooks; `collectives.TASKS` says what each op does.

Invariants:
- Collectives are issued in the plan's order, whatever the order in which gradients arrive; so all ranks issue alike.
- An op that has nothing to do in this backward keeps its place in its lane as an empty task, so whatever waits for it still
  waits for all that it would have waited for.
- A buffer is referenced until compute is known to be behind its last reader; the plan says when.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from commplan.errors import DivergenceError, ExecutionError
from commplan.execute import irregular
from commplan.execute.backward import Backward
from commplan.execute.collectives import Store
from commplan.execute.control import Check, Control, Message
from commplan.execute.declared import declared_bytes
from commplan.execute.instance import Instance, PartialSum
from commplan.execute.interface import Gradients, Unit
from commplan.execute.issuing import Issuer
from commplan.execute.lanes import Lanes, Token
from commplan.execute.lookout import Lookout, Place
from commplan.execute.memory import Memory
from commplan.execute.program import Program, index_plan
from commplan.execute.ranges import Range, no_range
from commplan.execute.report import BackwardReport
from commplan.ops import Section
from commplan.plan.model import Buffer, BufferKind, OpStep, Plan, Step, WaitStep


@dataclass(frozen=True, slots=True)
class Machinery:
    """What an executor works with.

    Attributes:
        control: None where ranks need not be compared.
        compares_reductions: whether ranks agree on the parameters of each reduction before it begins.
        lookout: tells in errors where other ranks are.
        make_range: makes the ranges that a profiler shows, around each op and each wait of compute.
    """

    lanes: Lanes
    memory: Memory
    control: Control | None
    compares_reductions: bool = False
    lookout: Lookout | None = None
    make_range: Range = no_range


P = ParamSpec("P")


def _on_compute(method: Callable[Concatenate[Executor, P], None]) -> Callable[Concatenate[Executor, P], None]:
    """`method`, whose allocations, waits and releases belong to compute as the lanes see it."""

    @functools.wraps(method)
    def wrapped(self: Executor, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with self._lanes.compute():
            method(self, *args, **kwargs)

    return wrapped


class Executor:
    """Drives units through a plan. Not for use by two threads at once.

    Args:
        plan: what to run; `refuse_unsupported` tells whether it can be.
        units: the modules, in the order of the plan's table.
    """

    def __init__(self, plan: Plan, units: Sequence[Unit], machinery: Machinery) -> None:
        self._lanes = machinery.lanes
        self._memory = machinery.memory
        self._control = machinery.control
        self._lookout = machinery.lookout
        self._checks: list[Check] = []
        self._failure: ExecutionError | None = None
        self.host_wait: tuple[str, float] | None = None
        self._store = Store(machinery.memory, make_range=machinery.make_range)
        before_each = machinery.control if machinery.compares_reductions else None
        self._issuer = Issuer(machinery.lanes, self._store, before_each, machinery.make_range)
        self._backward: Backward | None = None
        self._num_backwards = 0
        self.last_report: BackwardReport | None = None
        self.set_plan(plan, units)
        if self._lookout is not None:
            self._lookout.watch(self.place, self._lanes.fail)

    # What a framework calls: see `interface`.

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._program.plan

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun and not reached the end of root."""
        return self._backward is not None

    @property
    def failure(self) -> ExecutionError | None:
        """Why nothing can run any more, if so."""
        failure = self._failure or self._lanes.failure
        return failure if failure is None or isinstance(failure, ExecutionError) else ExecutionError(str(failure))

    @property
    def is_suspicious(self) -> bool:
        """Whether a backward is under way or failed, or the outcome of a rank check was not looked at."""
        return self._backward is not None or bool(self._checks) or self.failure is not None

    @property
    def holds_partial_sums(self) -> bool:
        """Whether earlier backwards left partial sums."""
        return bool(self._store.partial_sums)

    @property
    def has_pre_backward_hooks(self) -> bool:
        """Whether the plan does anything before compute of a module."""
        return bool(self._program.pre_position)

    def raise_failure(self) -> None:
        """Raise if an earlier backward failed: nothing can run any more."""
        if (failure := self.failure) is not None:
            raise ExecutionError(
                f"an earlier backward failed ({failure}); its gradients are lost: end this job, or detach and attach again"
            ) from failure

    def fail(self, error: ExecutionError) -> ExecutionError:
        """Nothing can run any more because of `error`; what to raise instead, which says where the other ranks are."""
        if self._failure is None:
            can_tell = self._lookout is not None and not isinstance(error, DivergenceError)
            self._failure = self._lookout.explain(error) if can_tell and self._lookout is not None else error
            self._lanes.fail(self._failure)
        return self._failure

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Inside, an ExecutionError is the end of this executor."""
        try:
            yield
        except ExecutionError as error:
            failure = self.fail(error)
            if failure is error:
                raise
            raise failure from error

    def settle(self, *, waits: bool) -> None:
        """Raise what comparing ranks has found since backward returned, where it did not wait for that.

        Args:
            waits: until the outcome is known.
        """
        while self._checks and (waits or self._checks[0].is_over):
            self._checks.pop(0).wait()

    def place(self) -> Place:
        """Where this rank is. May be called by any thread."""
        backward = self._backward
        where = f"in backward {backward.number}" if backward is not None else f"after backward {self._num_backwards}"
        host_wait = self.host_wait
        return Place(where, (*self._lanes.in_flight(), *([host_wait] if host_wait is not None else [])))

    def begin(self) -> None:
        """A backward begins. The calls below begin one too."""
        with self.failing():
            self.settle(waits=False)
            self._current()

    def set_plan(self, plan: Plan, units: Sequence[Unit]) -> None:
        """Run `plan` from the next backward on. Partial sums stay with their units."""
        assert self._backward is None, "a plan can't be exchanged in mid-backward"
        self._program: Program = index_plan(plan)
        for lane in plan.lanes:
            self._lanes.open(lane.name, lane.priority)
        self._units = tuple(units)

    @_on_compute
    def pre_backward(self, need_index: int) -> None:
        """Compute of the module that is needed `need_index`-th is about to begin."""
        with self.failing():
            self.settle(waits=False)
            backward = self._current()
            position = self._program.pre_position.get(need_index)
            if position is not None and not backward.is_collecting:
                self._open_through(position)

    @_on_compute
    def complete(self, module: int, gradients: Gradients) -> None:
        """The gradients of `module` are complete. The second time in one backward they are reduced again and accumulated."""
        with self.failing():
            self._complete(module, gradients)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, a hook opens only when all before it did: gradients come in an order that means nothing."""
        backward = self._backward
        if backward is None:
            yield
            return
        backward.is_collecting = True
        try:
            yield
        finally:
            backward.is_collecting = False

    @_on_compute
    def root(self) -> None:
        """All gradients are complete: finish every op, and leave nothing running.

        Raises:
            ExecutionError: a collective failed or took too long, or ranks did different things; `.grad` is not to be used.
        """
        with self.failing():
            self._finish_all()

    @_on_compute
    def abort(self) -> None:
        """Drop the backward that is under way, partial sums included, once what is in flight has ended."""
        backward, self._backward = self._backward, None
        self._lanes.drain()
        buffers = [partial.buffer for partial in self._store.partial_sums.values()]
        for instance in backward.instances if backward is not None else ():
            self._memory.drop(instance.held_bytes)
            buffers.extend(instance.inputs)
            # One that was left as a partial sum belongs to the store, or to whoever adds to it.
            if instance.shard is not None and instance.all_reduce:
                buffers.append(instance.shard)
        grads = {id(i.shard) for i in backward.instances if i.is_grad} if backward is not None else set()
        for buffer in buffers:
            self._memory.release(buffer, kept=id(buffer) in grads)
        self._store.partial_sums.clear()
        self._store.irregular_bytes = 0
        self._lanes.take_intervals()
        self._lanes.rest()

    def take_partial_sums(self) -> dict[Unit, PartialSum]:
        """Let go of the partial sums that earlier backwards left, and return them."""
        assert self._backward is None
        taken, self._store.partial_sums = self._store.partial_sums, {}
        for partial in taken.values():
            self._memory.release(partial.buffer, kept=True)
        return taken

    def pending_ops(self) -> tuple[str, ...]:
        """Names of the ops that the backward under way still owes to modules whose gradients are complete."""
        backward = self._backward
        if backward is None:
            return ()
        ready = backward.late | backward.live
        steps = (s for s in self._program.plan.steps if isinstance(s, OpStep) and s.op.first in ready)
        return tuple(str(s.op) for s in steps if s.op not in backward.tokens or ready[s.op.first].is_owed(s.kind))

    def close(self) -> None:
        """Drop everything and end the lanes. Waits for what is in flight, at most the timeout of a collective."""
        self.abort()
        self.end_threads()

    def end_threads(self) -> None:
        """End what runs beside the calling thread, whatever it waits for; nothing can run any more."""
        self._lanes.close()
        if self._control is not None:
            self._control.close()
        if self._lookout is not None:
            self._lookout.close()

    # The loop.

    def _complete(self, module: int, gradients: Gradients) -> None:
        backward = self._current()
        instance = Instance.of(self._units[module], gradients)
        backward.record.append(f"{instance.unit.name}: {instance.in_words()}")
        position = self._program.post_position[module]
        if module in backward.live or module in backward.late:
            irregular.reduce_again(backward, module, instance, self._program, self._issuer)
        elif position < backward.cursor:
            irregular.postpone(backward, module, instance, self._memory)
        else:
            backward.live[module] = instance
            if backward.is_collecting:
                self._open_ready()
            else:
                self._open_through(position)
            if position >= backward.cursor:
                self._hold(module, instance)

    def _finish_all(self) -> None:
        backward = self._current()
        self._num_backwards += 1
        irregular.postpone_partial_sums(backward, self._units, self._store)
        if not backward.live and not backward.late:
            self._backward = None
            return
        if self._control is not None:
            # Backwards without a reduction are counted too: ranks that accumulate differently must not meet.
            head = (f"plan {self._program.digest}", f"backward {self._num_backwards}")
            self._checks.append(self._control.begin(Message.BACKWARD, (*head, *backward.record), tell=self._lanes.fail))
        self._open_through(self._program.root - 1)
        irregular.run_late(backward, self._program, self._issuer)
        self._open_through(self._program.root)
        irregular.apply_repeated(backward, self._program, self._issuer)
        self._issuer.wait(self._outstanding())
        self.settle(waits=self._lanes.blocks_host)
        self._finish()

    def _current(self) -> Backward:
        if self._backward is None:
            self.raise_failure()
            self._memory.restart_peak()
            sums = self._store.partial_sums
            previous_bytes = {module: sums[unit].buffer.nbytes for module, unit in enumerate(self._units) if unit in sums}
            self._backward = Backward(time.perf_counter(), previous_bytes, self._num_backwards + 1)
        return self._backward

    def _open_through(self, position: int) -> None:
        backward = self._current()
        while backward.cursor <= position:
            at = backward.cursor
            backward.cursor += 1
            hook = self._program.hooks[at]
            for number, step in enumerate(hook.steps, self._program.first_step[at]):
                self._run_step(number, step)
            if hook.section is Section.POST_BACKWARD and hook.n in backward.live:
                self._hold(hook.n, backward.live[hook.n])

    def _open_ready(self) -> None:
        """Open the hooks that come next as long as their modules are complete."""
        backward = self._current()
        while (hook := self._program.hooks[backward.cursor]).section is not Section.ROOT:
            if hook.section is Section.POST_BACKWARD and hook.n not in backward.live:
                return
            self._open_through(backward.cursor)

    def _run_step(self, number: int, step: Step) -> None:
        backward = self._current()
        waits = [backward.tokens[op] for op in step.waits]
        if isinstance(step, WaitStep):
            self._issuer.wait(waits, str(number))
        else:
            self._issuer.issue(backward, step, backward.live.get(step.op.first), waits, str(number))
        for buffer in self._program.frees.get(number, ()):
            self._free(buffer)

    def _hold(self, module: int, instance: Instance) -> None:
        """Count gradients that no op has packed, from now on."""
        backward = self._current()
        instance.hold_gradients(self._memory)
        if instance.held_bytes:
            backward.held.setdefault(module, (instance.held_bytes, self._program.first_step[backward.cursor]))

    def _outstanding(self) -> list[Token]:
        """The ends of everything that was issued: root ends with compute waiting for every lane."""
        backward = self._current()
        return [*backward.tokens.values(), *(i.last for i in backward.instances if i.last is not None)]

    def _free(self, buffer: Buffer) -> None:
        instance = self._current().live.get(buffer.first)
        if instance is not None and buffer.kind is BufferKind.RS_INPUT:
            instance.release_inputs(self._memory)
        elif instance is not None and buffer.kind is BufferKind.SHARD:
            instance.write()
            instance.release_shard(self._memory)

    def _finish(self) -> None:
        backward = self._current()
        for instance in backward.instances:
            instance.release_inputs(self._memory)
            instance.write()
            instance.release_shard(self._memory)
        ops, waits = self._lanes.take_intervals()
        backward.irregular_bytes += self._store.irregular_bytes
        self._store.irregular_bytes = 0
        self.last_report = BackwardReport(
            backward.begin_s,
            time.perf_counter(),
            ops,
            waits,
            self._memory.peak_bytes,
            declared_bytes(self._program, backward),
            self._num_backwards,
            self._program.plan,
            backward.ranks_of,
        )
        self._backward = None
        if not self._store.partial_sums:
            self._lanes.rest()
