"""A schedule as written: frozen, still symbolic in `n` and in its params, each line with its place in the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict

from commplan.errors import Span
from commplan.ops import Axis, Kind, Section, When


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Number(_Frozen):
    """A number in a schedule: written out (`value`) or the name of a param."""

    value: int | None = None
    param: str | None = None

    def resolve(self, params: Mapping[str, int]) -> int:
        """The number under `params` (every param of the schedule bound to a value)."""
        if self.param is not None:
            return params[self.param]
        assert self.value is not None
        return self.value

    def __str__(self) -> str:
        return self.param if self.param is not None else str(self.value)


class Index(_Frozen):
    """Which module a reference names: `_n`, `_<n-1>`, `_<n+k>` (sign and distance), or every module (`_*`)."""

    sign: int = 0
    distance: Number = Number(value=0)
    every: bool = False

    def offset(self, params: Mapping[str, int]) -> int:
        """The distance to n in modules; meaningless where `every`."""
        return self.sign * self.distance.resolve(params)

    def __str__(self) -> str:
        if self.every:
            return "*"
        if self.sign == 0:
            return "n"
        return f"<n{'-' if self.sign < 0 else '+'}{self.distance}>"


class OpRef(_Frozen):
    """An op as a schedule names it, `AR_<n-1>`, and where it is named. `str` is the text that parses to it."""

    family: str
    index: Index
    span: Span

    def __str__(self) -> str:
        return f"{self.family}_{self.index}"


class Fuse(_Frozen):
    """Bucketing: at most `modules` members, or at most `size_bytes` of wire input on one rank; the last `tail` unfused."""

    modules: Number | None = None
    size_bytes: Number | None = None
    tail: Number = Number(value=0)


class WaitLine(_Frozen):
    """`- wait: X`: compute waits for these ops."""

    refs: tuple[OpRef, ...]
    span: Span


class OpLine(_Frozen):
    """`- RS_n: {after: compute_n}`: place an op. `spans` has the place of each attribute key that was written.

    `dtype` is the schedule's name of the wire type (a key of `WIRE_DTYPES`); None is the model's reduce dtype.
    """

    ref: OpRef
    kind: Kind
    axis: Axis | None
    after: tuple[OpRef, ...] = ()
    lane: str
    fuse: Fuse | None = None
    chunks: Number = Number(value=1)
    dtype: str | None = None
    when: When = When.EVERY
    spans: Mapping[str, Span] = {}

    @property
    def span(self) -> Span:
        """Where the op is named."""
        return self.ref.span


Line = WaitLine | OpLine


class Lane(_Frozen):
    """A lane that the schedule declares; `priority` is "high" or "normal", `own_communicator` from `communicator: own`."""

    name: str
    priority: str = "normal"
    own_communicator: bool = False
    span: Span


class Param(_Frozen):
    """An integer that a run may set within `minimum..maximum` (None: no upper bound)."""

    name: str
    default: int
    minimum: int = 0
    maximum: int | None = None
    span: Span


class ScheduleSpec(_Frozen):
    """A parsed schedule, language version 1. `file` names it in messages; `text` is the YAML it was read from."""

    file: str
    text: str
    name: str
    summary: str
    name_span: Span
    params: tuple[Param, ...] = ()
    lanes: tuple[Lane, ...] = ()
    pre_backward: tuple[Line, ...] = ()
    post_backward: tuple[Line, ...] = ()
    root: tuple[Line, ...] = ()

    def lines(self, section: Section) -> tuple[Line, ...]:
        """The lines of one section, in file order."""
        return {
            Section.PRE_BACKWARD: self.pre_backward,
            Section.POST_BACKWARD: self.post_backward,
            Section.ROOT: self.root,
        }[section]


LANGUAGE_VERSION: Final = 1
