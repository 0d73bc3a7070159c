"""The vocabulary: kinds of op, mesh axes, hooks, lanes, and the name of an op.

Everything else is said in these words.  Nothing here imports a library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Kind(StrEnum):
    """What an op does with its module."""

    ALL_GATHER = "all_gather"
    COMPUTE = "compute"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    APPLY = "apply"


class Axis(StrEnum):
    """A dimension of the device mesh."""

    SHARD = "shard"
    REPLICATE = "replicate"


class Section(StrEnum):
    """Where in backward a line of a schedule is placed."""

    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    ROOT = "root"


class When(StrEnum):
    """In which backwards of an accumulated step an op runs."""

    EVERY = "every"
    LAST_BACKWARD = "last_backward"


COMPUTE_LANE: Final = "compute"
SHARD_LANE: Final = "shard"
REPLICATE_LANE: Final = "replicate"
BUILT_IN_LANES: Final = (COMPUTE_LANE, SHARD_LANE, REPLICATE_LANE)


@dataclass(frozen=True, slots=True)
class KindTraits:
    """What is true of every op of a kind: its default family name, mesh axis (None: no collective) and lane."""

    family: str
    axis: Axis | None
    lane: str


TRAITS: Final[Mapping[Kind, KindTraits]] = MappingProxyType(
    {
        Kind.ALL_GATHER: KindTraits("AG", Axis.SHARD, SHARD_LANE),
        Kind.COMPUTE: KindTraits("compute", None, COMPUTE_LANE),
        Kind.REDUCE_SCATTER: KindTraits("RS", Axis.SHARD, SHARD_LANE),
        Kind.ALL_REDUCE: KindTraits("AR", Axis.REPLICATE, REPLICATE_LANE),
        Kind.APPLY: KindTraits("apply", None, COMPUTE_LANE),
    }
)

KIND_OF_FAMILY: Final[Mapping[str, Kind]] = MappingProxyType({t.family: k for k, t in TRAITS.items()})

WIRE_DTYPES: Final[Mapping[str, str]] = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
"""Names of wire types in a schedule -> torch's names."""

ITEMSIZE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
)
"""Bytes an element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True, order=True)
class OpId:
    """The name of one concrete op: `AR_6`, a bucket `AR_3-6`, a piece of it `AR_6[1/4]` (second of four).

    `first..last` are module indices in completion order (in need order for an all-gather); `piece` counts from 0.
    `str` and `parse` are inverses.
    """

    family: str
    first: int
    last: int = -1
    piece: int = 0
    pieces: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.last == -1:
            object.__setattr__(self, "last", self.first)
        # Names are looked up far more often than they are made.
        object.__setattr__(self, "_hash", hash((self.family, self.first, self.last, self.piece, self.pieces)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[OpId], tuple[str, int, int, int, int]]:
        # Another process hashes text otherwise.
        return OpId, (self.family, self.first, self.last, self.piece, self.pieces)

    @property
    def members(self) -> range:
        """The modules that this op covers, ascending."""
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        modules = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        piece = "" if self.pieces == 1 else f"[{self.piece}/{self.pieces}]"
        return f"{self.family}_{modules}{piece}"

    @classmethod
    def parse(cls, text: str) -> OpId:
        """The op that `text` names.

        Raises:
            ValueError: if `text` is not the `str` of an op.
        """
        match = _OP_ID.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not the name of an op: expected AR_6, AR_3-6 or AR_6[1/4]")
        first = int(match["first"])
        op = cls(
            match["family"],
            first,
            int(match["last"]) if match["last"] else first,
            int(match["piece"]) if match["piece"] else 0,
            int(match["pieces"]) if match["pieces"] else 1,
        )
        if str(op) != text or op.last < op.first or op.piece >= op.pieces:
            raise ValueError(f"{text!r} is not the name of an op: module range or piece is out of order")
        return op


FAMILY_PATTERN: Final = r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z][A-Za-z0-9]*)*"
_OP_ID = re.compile(rf"(?P<family>{FAMILY_PATTERN})_(?P<first>\d+)(?:-(?P<last>\d+))?(?:\[(?P<piece>\d+)/(?P<pieces>\d+)\])?")


def piece_bounds(numel: int, piece: int, pieces: int) -> tuple[int, int]:
    """Where the `piece`-th of `pieces` contiguous parts of `numel` elements begins and ends."""
    return numel * piece // pieces, numel * (piece + 1) // pieces
