"""A measurement that goes on at each optimizer step of a script that knows nothing of it.

Torch's public hooks of the whole process drive it: forwards show the model, optimizer steps are the clock.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from commplan.bench.finding import ModelFinder
from commplan.bench.held import HeldAttachment, holding
from commplan.errors import AttachError
from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.attachment import Attachment, attach

Measurement = Generator[None, None, None]
"""Each `yield` is one step of the script."""


class _Enough(SystemExit):
    """Ends a script whose measurement is complete: `except Exception` lets it pass, and `finally` runs."""


class Stepper:
    """Lets a measurement go on at each step of the optimizer that trains the script's model.

    Args:
        measure: begins the measurement of a model, at the first step of its optimizer.
        end: told once, with the error that ended the script if one did: the script has ended, or is about to.

    Attributes:
        held: what the script attached itself.
    """

    def __init__(self, measure: Callable[[nn.Module], Measurement], end: Callable[[BaseException | None], None]) -> None:
        self.held: list[HeldAttachment] = []
        self._measure, self._tell_end = measure, end
        self._is_told = self._is_complete = False
        self._finder = ModelFinder()
        self._clock: Callable[[], Optimizer | None] = lambda: None
        self._steps: Measurement | None = None
        self._failure: Exception | None = None

    def run(self, work: Callable[[], object]) -> bool:
        """Run a training script, `work`, until the measurement is complete.

        Returns:
            Whether it was ended for that; then it may have left process groups behind.
        """
        with self._watching():
            try:
                work()
            except _Enough:
                pass
            except SystemExit as end:
                self._end(end if end.code else self._failure)
            except Exception as error:  # noqa: BLE001 - it is handed on, with what was measured until then
                self._end(error)
            else:
                self._end(self._failure)
        return self._is_complete

    def problem(self, before: str) -> str:
        """Why nothing was measured, in words, where the script is not to blame; `before` says what it never came to."""
        if self._steps is not None:
            return f"the script ended in the first steps, {before}: let it take more"
        if self.held or self._finder.has_found:
            return "no optimizer of torch.optim, which are the clock, took a step on the model that fully_shard sharded"
        return "no model that torch.distributed.fsdp.fully_shard sharded ran a training forward in this process"

    @contextmanager
    def others_attached(self, model: nn.Module) -> Iterator[list[str]]:
        """Inside, what the script attached to other models than `model` is at work there; notes that say so."""
        notes = []
        with ExitStack() as others:
            for held in [held for held in self.held if not _is_part(model, held.model)]:
                attachment = attach(held.model, held.spec, options=held.options, rank_checks=None, **held.params)
                held.current = others.enter_context(attachment)
                self.held.remove(held)
                notes.append(f"another model, {_name(held.model)}, has the schedule that the script attaches to it")
            yield notes

    @contextmanager
    def showing(self, attachment: Attachment) -> Iterator[None]:
        """Inside, what the script holds shows `attachment`."""
        for held in self.held:
            held.current = attachment
        try:
            yield
        finally:
            for held in self.held:
                held.current = None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Inside, forwards and optimizer steps are seen. Afterwards the model is FSDP2's again."""
        with ExitStack() as stack:
            stack.enter_context(holding(self.held))
            self._seeing = register_module_forward_pre_hook(private.without_dynamo(self._finder.before_forward))
            stack.callback(self._seeing.remove)
            clock = register_optimizer_step_post_hook(private.without_dynamo(self._after_step))
            stack.callback(clock.remove)
            stack.callback(self._close)
            yield

    def _end(self, error: BaseException | None) -> None:
        """What is told first holds."""
        if not self._is_told:
            self._is_told = True
            self._tell_end(error)

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has taken a step: if it is the model's, go on to where the measurement waits for the next one.

        Raises:
            _Enough: the measurement is complete.
        """
        if self._steps is None:
            model = self._finder.model_of(optimizer, [held.model for held in self.held])
            if model is None:
                return
            self._seeing.remove()
            self._clock = weakref.ref(optimizer)
            self._steps = self._measure(model)
        elif self._clock() is not optimizer:
            return
        if private.in_autograd():
            raise AttachError(
                "the optimizer steps inside backward, where no schedule can be attached or detached: let it step after it"
            )
        if self._failure is not None:
            # The script caught it and goes on, but there is nothing left that could.
            raise self._failure
        if not self._is_waiting():
            self._is_complete = True
            self._end(None)
            raise _Enough(0)

    def _is_waiting(self) -> bool:
        """Let the measurement go on to its next `yield`; whether there was one."""
        assert self._steps is not None
        try:
            for _ in self._steps:
                return True
        except Exception as error:
            self._failure = error
            raise
        return False


def device_of(model: nn.Module) -> torch.device:
    """Where a sharded model computes."""
    return _groups(model)[0].device


def in_words(model: nn.Module) -> str:
    """The model, its size and its mesh."""
    groups = _groups(model)
    num = sum(p.numel() for p in model.parameters())
    size = f"{num / 1e6:,.1f} M" if num >= 1e5 else f"{num:,}"
    mesh = private.mesh_facts(groups[0])
    replicas, shards = (1 if axis is None else axis.size() for axis in (mesh.replicate, mesh.shard))
    return f"{_name(model)} of {len(groups)} modules, {size} parameters, mesh ({replicas}, {shards})"


def _groups(model: nn.Module) -> list[private.ParamGroup]:
    return [group for _, state in private.states(model) for group in private.groups(state)]


def _is_part(model: nn.Module, other: nn.Module) -> bool:
    """Whether one of two modules holds the other."""
    return any(m is other for m in model.modules()) or any(m is model for m in other.modules())


def _name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
