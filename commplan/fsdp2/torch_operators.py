"""What commplan takes from torch under names with an underscore to watch its ops: for checks of devices, not for `attach`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commplan.execute.trace_log import Did, TracedModule


class AccessMode(TorchDispatchMode):
    """While active, every op of torch on this thread is a kernel in the log of `module`.

    Args:
        run: runs an op, `run(func, args, kwargs)`; for a device that does so later.
    """

    def __init__(self, module: TracedModule, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._module = module
        self._thread = threading.get_ident()
        self._run = run or (lambda func, args, kwargs: func(*args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Log `func`, and run it."""
        kwargs = kwargs or {}
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented
        # A backend's own threads inherit the mode with the collective that they work on.
        if self._module.log.is_quiet or threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if func.is_view or func.namespace == "prim":
            return func(*args, **kwargs)
        log, stream = self._module.log, self._module.current_stream(self._module.device).name
        reads, writes = _accessed(func, args, kwargs)
        # Before it runs: what it releases on its way must come behind it.
        read, written = ([log.part(t, None) for t in tensors] for tensors in (reads, writes))
        result = self._run(func, args, kwargs)
        made = {t.untyped_storage()._cdata: t for t in _tensors(result)}
        for t in (*reads, *writes):
            made.pop(t.untyped_storage()._cdata, None)
        fresh = [log.part(t, stream) for t in made.values()]
        if not func.name().startswith("aten::empty"):
            written += fresh
        if read or written:
            log.add(Did.KERNEL, stream, name=func.name(), reads=tuple(read), writes=tuple(written))
        return result

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        log, stream = self._module.log, self._module.current_stream(self._module.device).name
        tensors = _tensors(args)
        writes = tensors if "allreduce" in func.name() else tensors[:1]
        group = log.group
        log.begin_collective(group, stream)
        log.add(
            Did.KERNEL,
            group,
            name=func.name(),
            reads=tuple(log.part(t, None) for t in tensors),
            writes=tuple(log.part(t, None) for t in writes),
        )
        log.end_collective(group)
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _accessed(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that `func` reads, and those that it writes, by its schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for argument, value in [*zip(func._schema.arguments, args, strict=False)]:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(_tensors(value))
    by_name = {a.name: a for a in func._schema.arguments}
    for name, value in kwargs.items():
        is_written = by_name[name].alias_info is not None and by_name[name].alias_info.is_write
        (writes if is_written else reads).extend(_tensors(value))
    return reads, writes
