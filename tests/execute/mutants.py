"""Safeguards of the executor, each taken away: what a test must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from commplan.execute import collectives, releasing
from commplan.execute.backward import Backward
from commplan.execute.collectives import Call
from commplan.execute.executor import Executor
from commplan.execute.issuing import Issuer
from commplan.execute.program import Action
from commplan.ops import Kind
from commplan.plan.model import Buffer, BufferKind, OpStep, WaitStep

Mutant = Callable[[], Any]


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> Any:
    """Let method `name` be `wrapper(original, self, ...)`."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def waits_do_nothing() -> Any:
    """`wait:` lines are skipped."""

    def run(original: Any, self: Executor, backward: Backward, action: Action) -> None:
        step = action.step
        original(self, backward, replace(action, step=replace(step, waits=())) if isinstance(step, WaitStep) else action)

    return _wrap(Executor, "_run", run)


def ops_of_a_kind_wait_for_nothing(kind: Kind) -> Mutant:
    """Ops of a kind start whatever they should wait for."""

    def issue(original: Any, self: Issuer, backward: Backward, step: OpStep, action: Action, waits: Any) -> None:
        original(self, backward, step, action, [] if step.kind is kind else waits)

    return lambda: _wrap(Issuer, "issue", issue)


def every_shard_is_released_in_its_hook() -> Any:
    """Reduced shards are given back when the first step after their reduce-scatter is over."""

    def run(original: Any, self: Executor, backward: Backward, action: Action) -> None:
        original(self, backward, action)
        step = action.step
        if isinstance(step, OpStep) and step.kind is Kind.ALL_REDUCE:
            instance = backward.live.get(step.op.first)
            if instance is not None and instance.shard is not None:
                self._memory.release(instance.shard)
                self._memory.hold(instance.shard.nbytes)

    return _wrap(Executor, "_run", run)


def inputs_are_released_when_issued() -> Any:
    """A reduce-scatter's input is given back before it ran."""

    def reduce(original: Any, self: Issuer, backward: Backward, call: Call, *rest: Any) -> None:
        original(self, backward, call, *rest)
        if call.step.kind is Kind.REDUCE_SCATTER:
            for instance in call.instances:
                instance.release_inputs(self._store.memory)

    return _wrap(Issuer, "_reduce", reduce)


def inputs_are_never_released() -> Any:
    """Reduce-scatter inputs live until the end of root."""

    original = releasing.free

    def free(backward: Backward, buffer: Buffer, *rest: Any) -> None:
        if buffer.kind is not BufferKind.RS_INPUT:
            original(backward, buffer, *rest)

    return patch.object(releasing, "free", free)


def gradients_are_let_go_late() -> Any:
    """Gradients that were held are let go when there is a shard of them, not before."""

    def reduce(original: Any, self: Issuer, backward: Backward, call: Call, *rest: Any) -> None:
        held_bytes = 0
        for instance in call.instances:
            if instance.gradients is not None:
                held_bytes, instance.held_bytes = held_bytes + instance.held_bytes, 0
        original(self, backward, call, *rest)
        self._store.memory.drop(held_bytes)

    return _wrap(Issuer, "_reduce", reduce)


def partial_sums_are_dropped() -> Any:
    """What an earlier backward left is forgotten."""

    def begin(original: Any, self: Executor, **settings: Any) -> None:
        if self._backward is None:
            self._store.partial_sums.clear()
        original(self, **settings)

    return _wrap(Executor, "begin", begin)


def partial_sums_are_added_by_position() -> Any:
    """Partial sums are added whatever parameters they hold."""

    def add(total: Any, layout: Any, part: Any, part_layout: Any) -> None:
        total[: part.numel()] += part

    return patch.object(collectives, "add_into", add)


def root_does_not_wait() -> Any:
    """Root returns while lanes still work."""
    return patch.object(Executor, "_outstanding", lambda self: [])


def postdivide_is_forgotten() -> Any:
    """The factor after reduction is left out."""
    return patch.object(collectives, "_divide", lambda tensor, factor: None)


def skipped_ops_hold_no_place() -> Any:
    """An op with nothing to do is not queued, so what waits for it waits for nothing."""

    def reduce(original: Any, self: Issuer, backward: Backward, call: Call, *rest: Any) -> None:
        if call.instances:
            original(self, backward, call, *rest)
        else:
            backward.tokens[call.op] = self._lanes.mark()

    return _wrap(Issuer, "_reduce", reduce)


MUTANTS: Mapping[str, Mutant] = {
    "waits do nothing": waits_do_nothing,
    "AR waits for nothing": ops_of_a_kind_wait_for_nothing(Kind.ALL_REDUCE),
    "apply waits for nothing": ops_of_a_kind_wait_for_nothing(Kind.APPLY),
    "shards are released early": every_shard_is_released_in_its_hook,
    "inputs are released early": inputs_are_released_when_issued,
    "inputs are released late": inputs_are_never_released,
    "gradients are let go late": gradients_are_let_go_late,
    "partial sums are dropped": partial_sums_are_dropped,
    "partial sums are added by position": partial_sums_are_added_by_position,
    "factors are forgotten": postdivide_is_forgotten,
}
"""What is taken away -> how."""


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Without that safeguard; None: with all of them."""
    if name is None:
        yield
        return
    with MUTANTS[name]():
        yield
