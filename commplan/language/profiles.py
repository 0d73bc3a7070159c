"""The profile: what a job's compute and communication cost. Written by `commplan profile`, or by hand; read as YAML."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from commplan.errors import CommplanError
from commplan.language.source import decode, read_bytes, shown
from commplan.ops import Axis, Kind

MAX_PROFILE_BYTES: Final = 4 * 1024 * 1024
_MAX_REPORTED: Final = 20

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Speed = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Transfer(_Part):
    """What a collective takes alone, as a function of its bytes.

    Bytes are those of the whole tensor on one rank: of a reduce-scatter its input, of an all-gather its output, of an
    all-reduce what it reduces in place.  Either `latency_s` and `bytes_per_s`, or measured `points` (bytes, seconds),
    ascending: straight lines between them, and the last line goes on.
    """

    latency_s: Seconds = 0
    bytes_per_s: Speed | None = None
    points: tuple[tuple[Annotated[int, Field(ge=0)], Seconds], ...] = ()

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Transfer:
        if self.points and self.bytes_per_s is not None:
            raise ValueError("give bytes_per_s or points, not both")
        if not self.points and self.bytes_per_s is None:
            raise ValueError("give bytes_per_s (with latency_s), or points")
        if self.points and any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(self.points)):
            raise ValueError("points ascend: more bytes, and no fewer seconds")
        return self

    def seconds(self, size_bytes: int) -> tuple[float, float]:
        """Of `size_bytes`: the latency, which shares nothing, and the transfer."""
        if self.bytes_per_s is not None:
            return self.latency_s, size_bytes / self.bytes_per_s
        first = self.points[0]
        if len(self.points) == 1 or size_bytes <= first[0]:
            latency_s = min(first[1], self.latency_s or first[1])
            return latency_s, first[1] - latency_s
        low, high = next(((a, b) for a, b in pairwise(self.points) if size_bytes <= b[0]), self.points[-2:])
        total_s = low[1] + (size_bytes - low[0]) * (high[1] - low[1]) / (high[0] - low[0])
        latency_s = min(first[1], self.latency_s or first[1])
        return latency_s, total_s - latency_s


class AxisCosts(_Part):
    """Collectives over one axis of the mesh, and the link that they use.

    Attributes:
        fsdp2_all_gather: what FSDP2's own takes where it holds compute; without it, what `all_gather` does.
    """

    link: str
    all_gather: Transfer | None = None
    fsdp2_all_gather: Transfer | None = None
    reduce_scatter: Transfer | None = None
    all_reduce: Transfer | None = None


class Link(_Part):
    """What several transfers share.

    Attributes:
        demand: the part of it that one transfer fills.
        slowdown: seconds that a second of compute takes longer while there is a transfer on it.
    """

    demand: Part = 1
    slowdown: Seconds = 0


class Host(_Part):
    """What the thread (on a device: the stream) of compute does for communication.

    Attributes:
        issue_s: for each op that it issues.
        pack_bytes_per_s: copies gradients into the input of a reduce-scatter, and shards into that of an all-gather.
        unpack_bytes_per_s: copies gathered parameters to their places.
        apply_s: for each apply; `apply_bytes_per_s` of the reduced shard besides.
    """

    issue_s: Seconds = 0
    pack_bytes_per_s: Speed | None = None
    unpack_bytes_per_s: Speed | None = None
    apply_s: Seconds = 0
    apply_bytes_per_s: Speed | None = None


class Compute(_Part):
    """Backward of each module alone, without communication: `default`, or what `modules` has under its name."""

    default: Seconds | None = None
    modules: dict[str, Seconds] = Field(default_factory=dict)


class Profile(_Part):
    """What a job costs.

    Attributes:
        source: where the figures are from: machine, versions and command, or formulas.
        compute_s: see `Compute`.
        axes: by the axis of the mesh.
        links: by the names that `axes` use; one that is missing is filled by a transfer and slows nothing.
        host: see `Host`.
        fsdp2_gathers: how FSDP2 gathers parameters in backward, where the schedule does not: "blocking" holds compute (a
            CPU), "prefetched" is hidden behind compute of the module before (a device).
    """

    version: Literal[1] = 1
    name: str
    source: str = ""
    compute_s: Compute
    axes: dict[Axis, AxisCosts]
    links: dict[str, Link] = Field(default_factory=dict)
    host: Host = Host()
    fsdp2_gathers: Literal["blocking", "prefetched"] = "prefetched"

    def transfer(self, axis: Axis, kind: Kind) -> Transfer:
        """What collectives of `kind` over `axis` take.

        Raises:
            CommplanError: the profile does not say.
        """
        found = getattr(self.axes.get(axis), kind.value, None)
        if not isinstance(found, Transfer):
            missing = f"axes.{axis}.{kind.value}"
            raise CommplanError(
                f"the profile {self.name!r} does not say what everything costs that the plan does: add {missing}"
            )
        return found


def parse_profile(text: str, file: str = "<text>") -> Profile:
    """The profile that `text` spells in YAML; `file` names it in messages.

    Raises:
        CommplanError: naming the place of everything (of the first 20 things) that is wrong.
    """
    try:
        data = YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark is not None else "1:1"
        raise CommplanError(f"{file}:{place}: not YAML: {error.problem}") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise CommplanError(f"{file}: not YAML: {shown(str(error), 120)}") from error
    if not isinstance(data, dict):
        raise CommplanError(f"{file}:1:1: a profile is a mapping: `version: 1`, a name, `compute_s` and `axes`")
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        lines = [f"{file}:{_place(data, e['loc'])}: {_path(e['loc'])}: {e['msg']}" for e in error.errors()]
        rest = [f"and {len(lines) - _MAX_REPORTED} more"] if len(lines) > _MAX_REPORTED else []
        raise CommplanError("\n".join([*lines[:_MAX_REPORTED], *rest])) from error


def load_profile(path: str | Path) -> Profile:
    """The profile in a YAML file.

    Raises:
        CommplanError: if the file cannot be read or is no profile.
    """
    data = read_bytes(Path(path), MAX_PROFILE_BYTES)
    if len(data) > MAX_PROFILE_BYTES:
        raise CommplanError(f"{path}: larger than {MAX_PROFILE_BYTES >> 20} MiB, so hardly a profile")
    text, unreadable = decode(data, str(path))
    if unreadable is not None:
        raise CommplanError(f"{path}: {unreadable.message}; {unreadable.hint}")
    return parse_profile(text.removeprefix("\ufeff"), str(path))


def _path(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc)) or "the profile"


def _place(data: Any, loc: tuple[int | str, ...]) -> str:
    """`line:column` of the innermost part of `loc` that is there."""
    place = (0, 0)
    for key in loc:
        lc = getattr(data, "lc", None)
        try:
            found = data[key]
            place = lc.value(key) if lc is not None and isinstance(data, dict) else lc.item(key) if lc is not None else place
            data = found
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return f"{place[0] + 1}:{place[1] + 1}"
