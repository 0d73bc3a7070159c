"""The module table: what the compiler knows of a model. Readable and writable as JSON; holds no tensors."""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from commplan.ops import ITEMSIZE_BYTES, Axis

DEFAULT_SHAPE: Final = (1024, 1024)
"""Shape of the one fp32 parameter of each module when only a number of modules is given."""

_MAX_SIZE: Final = 2**53
"""No tensor has more elements, no axis more ranks; every size stays exact in JSON."""

_MAX_DIMS: Final = 16


def _known(dtype: str) -> str:
    if dtype not in ITEMSIZE_BYTES:
        raise ValueError(f"{dtype[:40]!r} is no dtype that communicates: expected one of {', '.join(ITEMSIZE_BYTES)}")
    return dtype


Size = Annotated[int, Field(ge=0, le=_MAX_SIZE)]
AxisSize = Annotated[int, Field(ge=1, le=_MAX_SIZE)]
CommunicatedDtype = Annotated[str, AfterValidator(_known)]
Name = Annotated[str, Field(max_length=1000)]


class Parameter(BaseModel):
    """One parameter, unsharded: `shape` in elements, `dtype` as torch names it; sharded on dimension `shard_dim`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    shape: tuple[Size, ...] = Field(max_length=_MAX_DIMS)
    dtype: str = "float32"
    requires_grad: bool = True
    shard_dim: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _is_sound(self) -> Parameter:
        if self.requires_grad:
            _known(self.dtype)
        if self.shard_dim >= max(len(self.shape), 1):
            raise ValueError(f"shard_dim {self.shard_dim} is not a dimension of the shape {list(self.shape)}")
        if self.numel > _MAX_SIZE:
            raise ValueError(f"the shape {list(self.shape)} has too many elements")
        return self

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def padded_numel(self, shard_size: int) -> int:
        """Elements that a reduce-scatter over `shard_size` ranks carries: the sharded dimension is padded to a multiple."""
        if not self.shape:
            return shard_size
        dim = self.shape[self.shard_dim]
        return math.ceil(dim / shard_size) * shard_size * (self.numel // dim if dim else 0)


class Module(BaseModel):
    """One communication unit: a parameter group of the sharded model.

    `axes` maps the mesh axes it is spread over to their sizes: {"replicate": 2, "shard": 4}.  An axis that is absent has no
    collective; one of size 1 has, over a group of one.  `group` tells meshes of equal sizes over different ranks apart,
    `scaling` what sums are divided by, if that is not the number of ranks: modules that differ in either share no bucket.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    parameters: tuple[Parameter, ...] = Field(min_length=1)
    axes: dict[Axis, AxisSize]
    reduce_dtype: CommunicatedDtype = "float32"
    gather_dtype: CommunicatedDtype = "float32"
    resharded_after_forward: bool = True
    group: str = ""
    scaling: str = ""

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the gradients (1 without a shard axis)."""
        return self.axes.get(Axis.SHARD, 1)

    @property
    def trainable(self) -> tuple[Parameter, ...]:
        """The parameters that take part in reduction."""
        return tuple(p for p in self.parameters if p.requires_grad)

    @property
    def reduced_numel(self) -> int:
        """Elements of the reduce-scatter input on one rank, padding included."""
        return sum(p.padded_numel(self.shard_size) for p in self.trainable)

    @property
    def shard_numel(self) -> int:
        """Elements of the reduced shard on one rank, padding included."""
        return self.reduced_numel // self.shard_size

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients as autograd leaves them (in the dtype that compute used), on one rank."""
        return sum(p.numel for p in self.trainable) * ITEMSIZE_BYTES[self.gather_dtype]

    @property
    def accumulated_gradient_bytes(self) -> int:
        """Bytes of unsharded gradients summed over backwards, on one rank: in the wider of the reduce dtype and their own."""
        itemsize_bytes = max(ITEMSIZE_BYTES[self.gather_dtype], ITEMSIZE_BYTES[self.reduce_dtype])
        return sum(p.numel for p in self.trainable) * itemsize_bytes

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the reduce-scatter input on one rank, in the reduce dtype."""
        return self.reduced_numel * ITEMSIZE_BYTES[self.reduce_dtype]

    @property
    def shard_bytes(self) -> int:
        """Bytes of the reduced shard on one rank, in the reduce dtype."""
        return self.reduced_bytes // self.shard_size

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the all-gather output on one rank (every parameter, trainable or not)."""
        return sum(p.padded_numel(self.shard_size) for p in self.parameters) * ITEMSIZE_BYTES[self.gather_dtype]


class ModuleTable(BaseModel):
    """Modules in the order in which their gradients become complete; `need_order` lists their indices in the order in
    which backward needs their parameters (empty: the same order).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    modules: tuple[Module, ...] = Field(min_length=1)
    need_order: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _orders_agree(self) -> ModuleTable:
        if not self.need_order:
            object.__setattr__(self, "need_order", tuple(range(len(self.modules))))
        if sorted(self.need_order) != list(range(len(self.modules))):
            raise ValueError(f"need_order must list each of 0..{len(self.modules) - 1} once, got {list(self.need_order)}")
        return self

    def __len__(self) -> int:
        return len(self.modules)

    @classmethod
    def uniform(cls, num_modules: int, *, replicate: int | None = 2, shard: int | None = 2) -> ModuleTable:
        """A table of equal modules on a (replicate, shard) mesh, for checking a schedule without a model; None for an axis
        that the mesh lacks.
        """
        sizes = {Axis.REPLICATE: replicate, Axis.SHARD: shard}
        axes = {axis: size for axis, size in sizes.items() if size is not None}
        module = Module(name="module", parameters=(Parameter(name="weight", shape=DEFAULT_SHAPE),), axes=axes)
        return cls(modules=tuple(module.model_copy(update={"name": f"module_{n}"}) for n in range(num_modules)))
