"""What commplan takes from torch under names with an underscore in order to notice faults; the rest is in `torch_private`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from commplan.fsdp2 import torch_private as private
from commplan.fsdp2 import torch_releases as releases

QUEUES_CALLBACK: Final = "_register_root_post_backward_final_callback"
"""The method of a state by which FSDP2 asks autograd for its final callback, once a backward."""

RESETS_ITERATION: Final = "_reset_iter_state"
"""The method of a state behind `FSDPModule.reset_iter_state`, where `resets_iterations`."""

resets_iterations = releases.resets_iterations

_ALL_GATHER: Final = "_all_gather_comm"


def own_store(store: Store) -> Store:
    """`store` over a connection of its own, where torch can: whoever blocks on one does not block the other.

    Raises:
        RuntimeError: the store does not answer.
    """
    # Where its process is gone, this fails at once, and making another connection tries for as long as the job's timeout.
    store.check(["commplan"])
    return store.clone() if hasattr(store, "clone") else store


class BackwardEnd:
    """Whether one backward of autograd has ended, and how: it calls this at its end, and only drops it when it raises."""

    class _Callback:
        def __init__(self, end: BackwardEnd) -> None:
            self._end = end

        def __call__(self) -> None:
            self._end.has_ended = True

        def __del__(self) -> None:
            self._end.has_raised = not self._end.has_ended
            if self._end.has_raised:
                self._end.on_raise()

    def __init__(self, on_raise: Callable[[], None]) -> None:
        """Watch the backward in which the calling thread is; where it raises, `on_raise` is called."""
        self.on_raise = on_raise
        self.has_ended = False
        self.has_raised = False
        Variable._execution_engine.queue_callback(self._Callback(self))


def context_of(state: private.State) -> int:
    """A number that states under one root share."""
    return id(state._state_ctx)


def is_in_forward(state: private.State) -> bool:
    """Whether a forward of the state's module began and did not end."""
    return state._training_state.name == "FORWARD"


def reshard(root: private.State) -> None:
    """Let a root forget forwards that raised; gradients that were accumulated without sync stay."""
    releases.reset_iteration(root)


def holds_whole_gradients(state: private.State) -> bool:
    """Whether gradients that were accumulated without sync wait anywhere under this root."""
    return any(
        p.unsharded_accumulated_grad is not None
        for inner in state._state_ctx.all_states
        for group in private.groups(inner)
        for p in group.fsdp_params
    )


def has_gradients(group: private.ParamGroup) -> bool:
    """Whether any `.grad` of the group holds more than zeros."""
    grads = (p.sharded_param.grad for p in group.fsdp_params)
    return any(bool(grad.to_local().any()) for grad in grads if isinstance(grad, DTensor))


def faces(group: private.ParamGroup) -> list[nn.Parameter]:
    """The sharded parameters of the group."""
    return [p.sharded_param for p in group.fsdp_params]


def alterations(group: private.ParamGroup, names: Sequence[str], facts: Sequence[private.ParamFacts]) -> Iterator[str]:
    """How parameters of `group` differ from what they were when `facts` were taken, in words."""
    for p, name, fact in zip(group.fsdp_params, names, facts, strict=True):
        sharded = p.sharded_param
        if sharded.dtype is not fact.orig_dtype:
            yield f"parameter {name!r} is in {sharded.dtype} now and was in {fact.orig_dtype}"
        elif sharded.device != group.device and not p.offload_to_cpu:
            yield f"parameter {name!r} is on {sharded.device} now and was on {group.device}"
        # Over all ranks; `fact` knows the part that one rank of a tensor-parallel group has.
        elif sharded.shape != p._sharding_spec.shape:
            yield f"parameter {name!r} has the shape {tuple(sharded.shape)} now and had {tuple(p._sharding_spec.shape)}"
        elif not _is_registered(p):
            yield f"parameter {name!r} was replaced by another object, which FSDP2 does not know"


def _is_registered(p: Any) -> bool:
    registered = p._module_info.module._parameters.get(p._module_info.param_name)
    return (
        registered is p.sharded_param
        or registered is getattr(p, "_unsharded_param", None)
        or registered is getattr(p, "_sharded_post_forward_param", None)
    )


class _WatchedWork(dist.Work):
    """A collective whose `wait` is `wait_for(work)`."""

    def __init__(self, work: dist.Work, wait_for: Callable[[dist.Work], None]) -> None:
        super().__init__()
        self._work = work
        self._wait_for = wait_for

    def wait(self, timeout: Any = None) -> bool:
        self._wait_for(self._work)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _WatchedAllGather:
    """FSDP2's all-gather of one group, waited for by `wait_for`, and over after `limit` whoever waits for it."""

    def __init__(self, original: Any, wait_for: Callable[[dist.Work], None], limit: timedelta) -> None:
        self._original = original
        self._wait_for = wait_for
        self._limit = limit

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """FSDP2's setters ask whether this is FSDP2's own."""
        return type(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with _limited(group, self._limit):
            work = self._original(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=True)
        if work is None:
            return None
        if async_op:
            return _WatchedWork(work, self._wait_for)
        self._wait_for(work)
        return None


@contextlib.contextmanager
def _limited(group: dist.ProcessGroup, limit: timedelta) -> Iterator[None]:
    """What begins inside on a gloo group may take so long, if the group has no shorter limit."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        # A group that is written in Python has none.
        backend = None
    is_gloo = dist.is_gloo_available() and isinstance(backend, dist.distributed_c10d.ProcessGroupGloo)
    before = getattr(backend.options, "_timeout", None) if is_gloo and hasattr(backend, "_set_default_timeout") else None
    if not isinstance(before, timedelta) or before <= limit:
        yield
        return
    backend._set_default_timeout(limit)
    try:
        yield
    finally:
        backend._set_default_timeout(before)


class WatchedAllGathers:
    """All-gathers of FSDP2 that were put under watch, so that they can be put back."""

    def __init__(self) -> None:
        self._originals: list[tuple[private.ParamGroup, Any]] = []

    def watch(self, group: private.ParamGroup, wait_for: Callable[[dist.Work], None], limit: timedelta) -> None:
        """Let `wait_for` do each wait of the host for an all-gather of `group`; not where this torch has no place for it.

        Args:
            limit: when gloo gives up an all-gather that nobody waits for any more. With one that never ends a process does
                not end either.
        """
        original = vars(group).get(_ALL_GATHER)
        if original is not None:
            setattr(group, _ALL_GATHER, _WatchedAllGather(original, wait_for, limit))
            self._originals.append((group, original))

    def undo(self) -> None:
        """Restore every group."""
        while self._originals:
            group, original = self._originals.pop()
            if isinstance(vars(group).get(_ALL_GATHER), _WatchedAllGather):
                setattr(group, _ALL_GATHER, original)
