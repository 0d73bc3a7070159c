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
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Concatenate, ParamSpec

from commplan.execute import irregular, releasing
from commplan.execute.backward import Backward
from commplan.execute.control import Message
from commplan.execute.declared import declared_bytes
from commplan.execute.gathering import Gathers
from commplan.execute.health import Health
from commplan.execute.instance import Instance, PartialSum, for_narrow_wire
from commplan.execute.interface import Gradients, Unit
from commplan.execute.issuing import Issuer
from commplan.execute.lanes import Token
from commplan.execute.machinery import Machinery
from commplan.execute.program import Action, Program, index_plan
from commplan.execute.rhythm import Rhythm
from commplan.execute.store import Store
from commplan.execute.waiting import HostWaits
from commplan.ops import Kind, Section
from commplan.plan.model import OpStep, Plan, WaitStep
from commplan.sight.report import BackwardReport

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
        plan: what to run.
        units: the modules, in the order of the plan's table.
    """

    def __init__(self, plan: Plan, units: Sequence[Unit], machinery: Machinery) -> None:
        self._machinery = machinery
        self._lanes = machinery.lanes
        self._memory = machinery.memory
        self._control = machinery.control
        self.health = Health(machinery.lanes, machinery.lookout)
        self.host_waits = HostWaits(counts=machinery.lanes.blocks_host)
        self.rhythm = Rhythm(machinery.lanes)
        self._store = Store(machinery.memory, make_range=machinery.make_range, sends_in_place=machinery.lanes.blocks_host)
        before_each = machinery.control if machinery.compares_reductions else None
        self._issuer = Issuer(machinery.lanes, self._store, before_each, machinery.make_range)
        self._backward: Backward | None = None
        self._num_backwards = 0
        self._words: dict[tuple[object, ...], str] = {}
        self.last_report: BackwardReport | None = None
        self.set_plan(plan, units)
        self.health.watch()
        # Models are dropped with a schedule attached, too.
        self._unattended = weakref.finalize(self, machinery.let_go_unattended)
        self._unattended.atexit = False

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
    def is_suspicious(self) -> bool:
        """Whether a backward is under way or failed, or the outcome of a rank check was not looked at."""
        return self._backward is not None or self.health.is_suspicious

    @property
    def holds_partial_sums(self) -> bool:
        """Whether earlier backwards left partial sums."""
        return bool(self._store.partial_sums)

    @property
    def holds_foreign_sums(self) -> bool:
        """Whether one of them was divided otherwise than the framework would have, since something travels in fp16."""
        return any(self._units[module] in self._store.partial_sums for module in self._program.sends_fp16)

    @property
    def has_pre_backward_hooks(self) -> bool:
        """Whether the plan does anything before compute of a module."""
        return bool(self._program.pre_position)

    @property
    def gathers(self) -> bool:
        """Whether the plan gathers parameters."""
        return self._program.gathers

    @property
    def accumulates(self) -> bool:
        """Whether the plan does less in backwards that are not the last of their step."""
        return self._program.accumulates

    def keeps_whole(self, module: int) -> bool:
        """Whether the gradients of `module` wait for a later backward, so that `keep` is to be called."""
        return module in self._program.kept_whole and not self._current().is_last

    def keeps_partial(self, module: int) -> bool:
        """Whether a partial sum of `module` waits for a later backward."""
        return module in self._program.kept_partial and not self._current().is_last

    def begin(self, *, is_last: bool = True, wanted: Collection[int] | None = None) -> None:
        """A backward begins. The calls below begin one too, as if without arguments.

        Args:
            is_last: of its step; in others, ops do not run that are for the last one.
            wanted: need indices of modules whose parameters the plan may gather; None: all.
        """
        with self.health.failing():
            self.health.settle(waits=False)
            self._current(is_last, wanted)

    def set_plan(self, plan: Plan, units: Sequence[Unit]) -> None:
        """Run `plan` from the next backward on. Partial sums stay with their units."""
        assert self._backward is None, "a plan can't be exchanged in mid-backward"
        self._program: Program = index_plan(plan)
        for lane in plan.lanes:
            self._lanes.open(lane.name, lane.priority)
        self._units = tuple(units)

    def acts_before(self, need_index: int) -> bool:
        """Whether `pre_backward` has anything to do."""
        program = self._program
        return program.gathers or need_index in program.pre_position or self._backward is None or self.health.is_suspicious

    @_on_compute
    def pre_backward(self, need_index: int) -> None:
        """Compute of the module that is needed `need_index`-th is about to begin."""
        with self.health.failing():
            self.health.settle(waits=False)
            backward = self._current()
            position = self._program.pre_position.get(need_index)
            if position is not None and not backward.is_collecting:
                self._open_through(position)
            backward.gathers.give(need_index, self._issuer.wait)

    @_on_compute
    def complete(self, module: int, gradients: Gradients) -> None:
        """The gradients of `module` are complete. The second time in one backward they are reduced again and accumulated."""
        with self.health.failing():
            self._complete(module, gradients)

    @_on_compute
    def keep(self, module: int, size_bytes: int) -> None:
        """The gradients of `module` are complete, and wait for a later backward; with what waited before, `size_bytes`."""
        with self.health.failing():
            backward = self._current()
            backward.record.append(f"{self._units[module].name}: kept")
            self._arrive(module)
            self._store.keep_gradients(self._units[module], size_bytes)
            _, since = backward.kept.get(module, (0, self._program.first_step[backward.cursor]))
            backward.kept[module] = (size_bytes, since)

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
        with self.health.failing():
            self._finish_all()

    @_on_compute
    def abort(self) -> None:
        """Drop the backward that is under way, partial sums included, once what is in flight has ended."""
        backward = self._backward
        self._end_backward()
        self._lanes.drain()
        releasing.drop(backward, self._store)
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
        steps = [s for s in self._program.plan.steps if isinstance(s, OpStep) and s.kind is not Kind.ALL_GATHER]
        return tuple(str(s.op) for s in steps if any(_is_owed(backward, s, ready[m]) for m in s.op.members if m in ready))

    def close(self) -> None:
        """Drop everything and end the lanes. Waits for what is in flight, at most the timeout of a collective."""
        self.abort()
        self.end_threads()

    def end_threads(self) -> None:
        """End what runs beside the calling thread, whatever it waits for; nothing can run any more."""
        self._unattended.detach()
        self._machinery.close()

    def outlast_threads(self) -> None:
        """Python ends, and what runs beside the calling thread has to be over before."""
        self._machinery.close_at_exit()

    # The loop.

    def _complete(self, module: int, gradients: Gradients) -> None:
        backward = self._current()
        instance = self._reduction_of(module, gradients)
        backward.record.append(self._in_words(instance))
        position = self._program.post_position[module]
        if module in backward.live or module in backward.late:
            irregular.reduce_again(backward, module, instance, self._program, self._issuer)
        elif position < backward.cursor:
            irregular.postpone(backward, module, instance, self._program, self._memory)
        else:
            backward.live[module] = instance
            self._arrive(module)
            if position >= backward.cursor:
                self._hold(module, instance)

    def _reduction_of(self, module: int, gradients: Gradients) -> Instance:
        """The reduction of gradients that just became complete, with what the plan changes of the framework's own."""
        unit = self._units[module]
        reduction = gradients.reduction
        if module in self._program.sends_fp16:
            reduction = for_narrow_wire(unit, reduction)
        all_reduce = gradients.all_reduce and not self.keeps_partial(module)
        instance = Instance(unit, reduction, gradients.layout, all_reduce, gradients)
        if unit in self._store.kept_bytes:
            # They were counted before, and are until they are packed.
            self._store.keep_gradients(unit, gradients.size_bytes)
            instance.held_bytes = self._store.kept_bytes.pop(unit)
            backward = self._current()
            backward.kept.pop(module, None)
            backward.held[module] = (instance.held_bytes, 0)
        return instance

    def _in_words(self, instance: Instance) -> str:
        """What ranks have to have in common."""
        key = instance.unit, instance.layout.params, instance.reduction.dtype, instance.all_reduce
        if key not in self._words:
            self._words[key] = f"{instance.unit.name}: {instance.in_words()}"
        return self._words[key]

    def _arrive(self, module: int) -> None:
        """The gradients of a module are complete: open its hook, if those before it may be."""
        backward = self._current()
        backward.arrived.add(module)
        if backward.is_collecting:
            self._open_ready()
        else:
            self._open_through(self._program.post_position[module])

    def _finish_all(self) -> None:
        backward = self._current()
        self._num_backwards += 1
        irregular.postpone_partial_sums(backward, self._units, self._program, self._store)
        if not backward.live and not backward.late and not backward.tokens:
            self._end_backward()
            return
        if self._control is not None and (backward.live or backward.late):
            # Backwards without a reduction are counted too: ranks that accumulate differently must not meet.
            head = (f"plan {self._program.digest}", f"backward {self._num_backwards}")
            self.health.expect(self._control.begin(Message.BACKWARD, (*head, *backward.record), tell=self._lanes.fail))
        self._open_through(self._program.root - 1)
        irregular.run_late(backward, self._program, self._issuer)
        self._open_through(self._program.root)
        irregular.apply_repeated(backward, self._program, self._issuer)
        self._issuer.wait(self._outstanding())
        self.health.settle(waits=self._lanes.blocks_host)
        self._finish()

    def _current(self, is_last: bool = True, wanted: Collection[int] | None = None) -> Backward:
        if self._backward is None:
            self.health.raise_failure()
            self._memory.restart_peak()
            sums = self._store.partial_sums
            previous_bytes = {module: sums[unit].buffer.nbytes for module, unit in enumerate(self._units) if unit in sums}
            need = self._program.need
            gathers = Gathers(
                [self._units[module] for module in need], set(range(len(need)) if wanted is None else wanted), self._store
            )
            begin_s = self.host_waits.begin_s(time.perf_counter())
            self._backward = Backward(begin_s, previous_bytes, self._num_backwards + 1, is_last, gathers)
            self.health.where = f"in backward {self._backward.number}"
            kept_bytes = self._store.kept_bytes
            self._backward.kept = {m: (kept_bytes[unit], 0) for m, unit in enumerate(self._units) if unit in kept_bytes}
        return self._backward

    def _end_backward(self) -> None:
        self._backward = None
        self.host_waits.clear()
        self.health.where = f"after backward {self._num_backwards}"

    def _open_through(self, position: int) -> None:
        backward = self._current()
        while backward.cursor <= position:
            at = backward.cursor
            backward.cursor += 1
            for action in self._program.actions[at]:
                self._run(backward, action)
            hook = self._program.hooks[at]
            if hook.section is Section.POST_BACKWARD and hook.n in backward.live:
                self._hold(hook.n, backward.live[hook.n])

    def _open_ready(self) -> None:
        """Open the hooks that come next as long as their modules are complete."""
        backward = self._current()
        while (hook := self._program.hooks[backward.cursor]).section is not Section.ROOT:
            if hook.section is Section.POST_BACKWARD and hook.n not in backward.arrived:
                return
            self._open_through(backward.cursor)

    def _run(self, backward: Backward, action: Action) -> None:
        tokens, step = backward.tokens, action.step
        waits = [tokens[op] for op in step.waits]
        if isinstance(step, WaitStep):
            self._issuer.wait(waits, action.text)
        else:
            self._issuer.issue(backward, step, action, waits)
        for buffer in action.frees:
            releasing.free(backward, buffer, self._program, self._memory)

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

    def _finish(self) -> None:
        backward = self._current()
        releasing.free_all(backward, self._memory)
        ops, waits = self._lanes.take_intervals()
        backward.irregular_bytes += self._store.irregular_bytes
        self._store.irregular_bytes = 0
        self.last_report = BackwardReport(
            backward.begin_s,
            time.perf_counter(),
            ops,
            self.host_waits.among(waits),
            self._memory.peak_bytes,
            declared_bytes(self._program, backward),
            self._num_backwards,
            self._program.plan,
            backward.ranks_of,
            tuple(self._memory.history),
        )
        self._end_backward()
        if not self._store.partial_sums:
            self._lanes.rest()


def _is_owed(backward: Backward, step: OpStep, instance: Instance) -> bool:
    """Whether an op that was not issued, or that had no effect yet, is still to come for a reduction."""
    return step.op not in backward.tokens or instance.is_owed(step.kind)
