"""Running a training script in this process, as `python SCRIPT ARGS...` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence

import torch.distributed as dist


def script_runner(command: Sequence[str]) -> Callable[[], object]:
    """What runs `SCRIPT ARGS...`, or `-m MODULE ARGS...`, as `__main__` with its own `sys.argv`."""
    is_module = command[0] == "-m"
    name, *arguments = command[is_module:]

    def work() -> None:
        kept = sys.argv, list(sys.path)
        sys.argv = [name, *arguments]
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(name)))
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = kept[0], kept[1]

    return work


def end_process_group() -> None:
    """Destroy the default process group, and all others with it, unless the script has."""
    if dist.is_initialized():
        dist.destroy_process_group()
