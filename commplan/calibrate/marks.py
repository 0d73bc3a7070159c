"""When modules computed in backward, and what the hooks between them did; told by the host's clock or by a device's events."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Final, Protocol, Self

import torch
from torch import nn

from commplan.fsdp2 import torch_private as private
from commplan.fsdp2.unit import FsdpUnit

_NOBODY: Final = ""
"""The module of the final hook."""


class Clock(Protocol):
    """Tells the time of compute."""

    def now(self) -> Any:
        """A mark: what compute has reached."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks; waits for a device to have passed them."""


class HostClock:
    """Compute is the calling thread."""

    def now(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """See `Clock`."""
        return end - begin


class DeviceClock:
    """Compute is the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)

    def now(self) -> Any:
        """See `Clock`."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """See `Clock`."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of compute on `device`."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)


class Hook(Enum):
    """What FSDP2 calls between pieces of compute."""

    FORWARD = "pre_forward"
    PRE = "pre_backward"
    POST = "post_backward"
    FINAL = private.FINAL_CALLBACK


BEGINS: Final = (Hook.FORWARD, Hook.PRE)
"""Hooks behind which a module computes: a forward that is run again, and backward."""

GATHERING: Final = ("unshard", "wait_for_unshard")
"""FSDP2's own all-gather of a group. The hook before one module begins that of the next, too."""


class Copy(Enum):
    """What the thread of compute does for communication, inside hooks."""

    PACK = "pack"
    UNPACK = "set_parameters"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Call:
    """A hook that ran; `module` is "" for the final one."""

    hook: Hook
    module: str
    begin: Any
    end: Any


@dataclass(frozen=True, slots=True)
class BackwardTimes:
    """One backward of one rank.

    Attributes:
        compute_s: of each module, without hooks.
        gathers_s: what FSDP2's own all-gather of each module held compute for, in whichever hooks.
        hooks_s: in all hooks.
        copies: what was copied inside of them: how often, and seconds.
    """

    compute_s: dict[str, float]
    gathers_s: dict[str, float]
    hooks_s: float
    copies: dict[Copy, tuple[int, float]]


@dataclass(slots=True)
class _Seen:
    """Marks of one backward."""

    calls: list[Call] = field(default_factory=list)
    gathers: list[tuple[str, Any, Any]] = field(default_factory=list)
    copies: list[tuple[Copy, Any, Any]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return bool(self.calls) and self.calls[-1].hook is Hook.FINAL


class Watch:
    """While it is entered, the hooks of a model that a schedule drives are timed; what they do stays the same.

    Args:
        units: those of the attachment.
        names: the modules of its plan; compute of others, which are frozen, counts as that of the next one of these.
    """

    def __init__(self, model: nn.Module, units: Sequence[FsdpUnit], names: Collection[str], clock: Clock) -> None:
        self._model, self._units, self._names, self._clock = model, units, names, clock
        self._replaced: list[tuple[object, str, bool, Any]] = []
        self._seen: list[_Seen] = []
        self._is_in_hook = False

    def __enter__(self) -> Self:
        for unit in self._units:
            for hook in (Hook.FORWARD, Hook.PRE, Hook.POST):
                self._replace(unit.raw, hook.value, partial(self._hook, hook, unit.name), is_hook=True)
            for method in GATHERING:
                self._replace(unit.raw, method, partial(self._gather, unit.name))
            for copy in Copy:
                self._replace(unit, copy.value, partial(self._copy, copy))
        for _, state in private.states(self._model):
            self._replace(state, Hook.FINAL.value, partial(self._hook, Hook.FINAL, ""), is_hook=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        while self._replaced:
            owner, name, was_own, before = self._replaced.pop()
            if was_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

    def take(self) -> list[BackwardTimes]:
        """The backwards that ended since the last call. On a device it waits for them."""
        over = [seen for seen in self._seen if seen.is_over]
        self._seen = [seen for seen in self._seen if not seen.is_over]
        return [self._times(seen) for seen in over]

    def _replace(self, owner: object, name: str, wrapper: Callable[..., Any], *, is_hook: bool = False) -> None:
        before = getattr(owner, name)
        self._replaced.append((owner, name, name in vars(owner), before))
        wrapped = partial(wrapper, before)
        setattr(owner, name, private.as_hook(name, wrapped) if is_hook else wrapped)

    def _hook(self, hook: Hook, module: str, original: Callable[..., Any], *args: Any) -> Any:
        if hook is Hook.FORWARD and not private.in_autograd():
            return original(*args)
        if not self._seen or (self._seen[-1].is_over and hook in BEGINS):
            self._seen.append(_Seen())
        if self._is_in_hook:
            # The final one completes what autograd told nobody of.
            return original(*args)
        seen, begin = self._seen[-1], self._clock.now()
        self._is_in_hook = True
        try:
            return original(*args)
        finally:
            self._is_in_hook = False
            seen.calls.append(Call(hook, module, begin, self._clock.now()))

    def _gather(self, module: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_in_hook:
            return original(*args, **kwargs)
        begin = self._clock.now()
        try:
            return original(*args, **kwargs)
        finally:
            self._seen[-1].gathers.append((module, begin, self._clock.now()))

    def _copy(self, copy: Copy, original: Callable[..., Any], *args: Any) -> Any:
        begin = self._clock.now()
        try:
            return original(*args)
        finally:
            if self._seen:
                self._seen[-1].copies.append((copy, begin, self._clock.now()))

    def _times(self, seen: _Seen) -> BackwardTimes:
        hooks_s = sum(self._clock.seconds(call.begin, call.end) for call in seen.calls)
        gathers_s: dict[str, float] = defaultdict(float)
        for module, begin, end in seen.gathers:
            gathers_s[module] += self._clock.seconds(begin, end)
        compute_s: dict[str, float] = defaultdict(float)
        waiting: list[float] = []
        last = _NOBODY
        for module, begin, end in compute_between(seen.calls):
            waiting.append(self._clock.seconds(begin, end))
            if module in self._names:
                compute_s[module] += sum(waiting)
                waiting, last = [], module
        if last != _NOBODY:
            compute_s[last] += sum(waiting)
        copies = {}
        for copy in Copy:
            spans = [self._clock.seconds(begin, end) for kind, begin, end in seen.copies if kind is copy]
            copies[copy] = len(spans), sum(spans)
        return BackwardTimes(dict(compute_s), dict(gathers_s), hooks_s, copies)


def compute_between(calls: Sequence[Call]) -> Iterator[tuple[str, Any, Any]]:
    """Whose backward computes between one hook and the next: (module, begin, end).

    Before a module's gradients are complete its own does.  Before another module is entered, by its backward or by a forward
    that is run again, it is that of the one that was entered last, or, behind the end of a module, of the next: what lies
    between two modules has no parameters.  At the end it is that of the innermost module which is not complete, as an
    embedding's in the root.
    """
    entered: list[str] = []
    before: Call | None = None
    for call in calls:
        if before is not None:
            if call.hook is Hook.POST or (call.hook in BEGINS and before.hook not in BEGINS):
                module = call.module
            elif call.hook in BEGINS:
                module = before.module
            else:
                module = entered[-1] if entered else before.module
            if module != _NOBODY:
                yield module, before.end, call.begin
        if call.hook in BEGINS and call.module not in entered:
            entered.append(call.module)
        elif call.hook is Hook.POST and call.module in entered:
            entered.remove(call.module)
        before = call
