"""Real text without a download: the source files of the Python standard library that runs the demonstration."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def library_folder() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(folder: Path, limit_bytes: int) -> bytes:
    """The `.py` files under `folder`, in the order of their names, end to end, cut at `limit_bytes`.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    pieces: list[bytes] = []
    size_bytes = 0
    for path in sorted(folder.rglob("*.py")):
        if size_bytes >= limit_bytes:
            break
        if not _LEFT_OUT.isdisjoint(path.relative_to(folder).parts):
            continue
        pieces.append(path.read_bytes())
        size_bytes += len(pieces[-1])
    if not pieces:
        raise FileNotFoundError(f"no Python source files under {folder}")
    return b"".join(pieces)[:limit_bytes]


class Batches:
    """Windows of a text: which ones follows from seed, step and rank alone, so every model sees the same."""

    def __init__(self, corpus: bytes, context: int, batch: int, seed: int) -> None:
        if len(corpus) <= context + 1:
            raise ValueError(f"the text has {len(corpus)} bytes, too few for a context of {context}")
        self._text = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self._context = context
        self._batch = batch
        self._seed = seed

    def get(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (the next byte), both int64 of shape (batch, context)."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step * 1_009 + rank)
        starts = torch.randint(len(self._text) - self._context, (self._batch, 1), generator=generator)
        window = self._text[starts + torch.arange(self._context + 1)].long()
        return window[:, :-1], window[:, 1:]
