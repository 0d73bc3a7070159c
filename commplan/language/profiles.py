"""The profile: what a job's compute and communication cost, in YAML."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from commplan.errors import CommplanError
from commplan.language.records import read_yaml
from commplan.language.source import did_you_mean, load_text, shown
from commplan.ops import Axis, Kind

MAX_PROFILE_BYTES: Final = 4 * 1024 * 1024

MAX_DEVIATION: Final = 2.0
"""Of jitter. Ten draws of mean 1 can't differ by 3 (the root of one less than their number)."""

ONE_LINE: Final = r"^[^\x00-\x1f\x7f-\x9f]*$"

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Speed = Annotated[float, Field(ge=1e-3, le=1e24, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]
Deviation = Annotated[float, Field(ge=0, le=MAX_DEVIATION)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Transfer(_Part):
    """What a collective takes alone, as a function of its bytes.

    Bytes are those of the whole tensor on one rank: of a reduce-scatter its input, of an all-gather its output, of an
    all-reduce what it reduces in place.  Either `latency_s` (0) and `bytes_per_s`, or measured `points` (bytes, seconds),
    ascending: straight lines between them, of which the first and the last go on; `latency_s` is then where the first one is at
    0 bytes, or what is given.
    """

    latency_s: Seconds | None = None
    bytes_per_s: Speed | None = None
    points: tuple[tuple[Annotated[int, Field(ge=0, le=2**53)], Seconds], ...] = ()

    @model_validator(mode="after")
    def _is_one_of_two(self) -> Transfer:
        if self.points and self.bytes_per_s is not None:
            raise ValueError("give bytes_per_s or points, not both")
        if not self.points and self.bytes_per_s is None:
            raise ValueError("give bytes_per_s (with latency_s), or points")
        if len(self.points) == 1 and self.points[0][0] > 0:
            raise ValueError("one point tells no speed: give two, or one at 0 bytes for what takes as long whatever its size")
        if any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(self.points)):
            raise ValueError("points ascend: more bytes, and no fewer seconds")
        return self

    def seconds(self, size_bytes: int) -> tuple[float, float]:
        """Of `size_bytes`: the latency, which shares nothing, and the transfer."""
        if self.bytes_per_s is not None:
            return self.latency_s or 0, size_bytes / self.bytes_per_s
        # What is left of the first line at 0 bytes is latency, unless the profile says better.
        at_zero_s = max(0, self._on_lines(0)) if self.latency_s is None else self.latency_s
        total_s = max(0, self._on_lines(size_bytes))
        latency_s = min(at_zero_s, total_s)
        return latency_s, total_s - latency_s

    def _on_lines(self, size_bytes: int) -> float:
        """The first and the last line go on beyond the points."""
        if len(self.points) == 1:
            return self.points[0][1]
        at = min(max(bisect_left(self.points, size_bytes, key=itemgetter(0)), 1), len(self.points) - 1)
        low, high = self.points[at - 1], self.points[at]
        return low[1] + (size_bytes - low[0]) * (high[1] - low[1]) / (high[0] - low[0])


class AxisCosts(_Part):
    """Collectives over one axis of the mesh, and the link that they use.

    Attributes:
        fsdp2_all_gather: how long compute waits for FSDP2's own, where it does; without it, what `all_gather` takes.
    """

    link: Annotated[str, Field(min_length=1, max_length=100)]
    all_gather: Transfer | None = None
    fsdp2_all_gather: Transfer | None = None
    reduce_scatter: Transfer | None = None
    all_reduce: Transfer | None = None


class Link(_Part):
    """What several transfers share.

    Attributes:
        demand: the part of it that one transfer fills.
        slowdown: seconds that a second of compute takes longer while there is a transfer on it.
        jitter: how much the time of a collective differs from one time to the next: standard deviation over mean.
    """

    demand: Part = 1
    slowdown: Seconds = 0
    jitter: Deviation = 0


class Host(_Part):
    """What the thread (on a device: the stream) of compute does for communication.

    Attributes:
        issue_s: for each op that it issues.
        pack_bytes_per_s: copies gradients into the input of a reduce-scatter, and shards into that of an all-gather.
        unpack_bytes_per_s: copies gathered parameters to their places.
        fsdp2_copy_bytes_per_s: likewise, and copies shards before it, where FSDP2 gathers by itself; without it, as
            `unpack_bytes_per_s`.
        packs_lone: whether a gradient that is alone in its reduce-scatter, uncut and as it travels, is packed, too: not on a
            CPU, where it is sent as it lies.
        apply_s: for each apply; `apply_bytes_per_s` of the reduced shard besides.
    """

    issue_s: Seconds = 0
    pack_bytes_per_s: Speed | None = None
    unpack_bytes_per_s: Speed | None = None
    fsdp2_copy_bytes_per_s: Speed | None = None
    packs_lone: bool = True
    apply_s: Seconds = 0
    apply_bytes_per_s: Speed | None = None


class Compute(_Part):
    """Backward of each module alone, without communication: `default`, or what `modules` has under its name.

    Attributes:
        jitter: how much it differs from one time to the next: standard deviation over mean.
    """

    default: Seconds | None = None
    modules: dict[str, Seconds] = Field(default_factory=dict)
    jitter: Deviation = 0


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
    name: Annotated[str, Field(min_length=1, max_length=200, pattern=ONE_LINE)]
    source: str = ""
    compute_s: Compute
    axes: dict[Axis, AxisCosts]
    links: dict[str, Link] = Field(default_factory=dict)
    host: Host = Host()
    fsdp2_gathers: Literal["blocking", "prefetched"] = "prefetched"

    @property
    def has_jitter(self) -> bool:
        """Whether it says how much anything differs from one time to the next."""
        return self.compute_s.jitter > 0 or any(link.jitter > 0 for link in self.links.values())

    @model_validator(mode="after")
    def _links_are_used(self) -> Profile:
        used = {costs.link for costs in self.axes.values()}
        for link in self.links:
            if link not in used:
                raise ValueError(f"no axis uses the link {shown(link)}: {did_you_mean(link, used)}")
        return self

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
    return read_yaml(text, file, Profile, "a profile is a mapping: `version: 1`, a name, `compute_s` and `axes`")


def load_profile(path: str | Path) -> Profile:
    """The profile in a YAML file.

    Raises:
        CommplanError: if the file cannot be read or is no profile.
    """
    return parse_profile(load_text(path, MAX_PROFILE_BYTES, "a profile"), str(path))
