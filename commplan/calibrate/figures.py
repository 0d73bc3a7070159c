"""From what was measured to a profile, with a word on each figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from commplan.calibrate.statistics import Spread, in_ms, rising_line, slowdown
from commplan.calibrate.sweep import SHARED, Measured, Swept
from commplan.errors import CommplanError
from commplan.language.modules import ModuleTable
from commplan.language.profile_text import Comments
from commplan.language.profiles import MAX_DEVIATION, Profile
from commplan.ops import Axis, Kind
from commplan.plan.model import Plan
from commplan.simulate import costs, simulate

SHARED_LINK: Final = "shared"

_JITTER_IS: Final = (
    "Standard deviation over mean, of {}: of a normal distribution whose middle half is as wide as that of what was measured."
)


@dataclass(frozen=True, slots=True)
class Beside:
    """A backward with communication beside compute: what one rank saw, in seconds.

    Attributes:
        alone_s: compute of all modules of this rank, with nothing beside it.
        compute_s: with communication beside it, hooks left out.
        hidden_s: by lane, collectives while compute went on; of any lane: `any_hidden_s`.
        overhead_s: of hooks, without waiting and copying.
        num_issued: ops that were issued in it.
        pack_s, unpack_s, write_s: copying gradients, parameters, and reduced gradients to `.grad`; of all modules.
    """

    alone_s: float
    compute_s: float
    hidden_s: Mapping[str, float]
    any_hidden_s: float
    overhead_s: float
    num_issued: int
    pack_s: float
    unpack_s: float
    write_s: float
    num_written: int

    @classmethod
    def middle(cls, seen: Sequence[Beside]) -> Beside:
        """The median of each figure."""

        def of(name: str) -> float:
            return statistics.median(getattr(one, name) for one in seen)

        lanes = dict.fromkeys(lane for one in seen for lane in one.hidden_s)
        return cls(
            of("alone_s"),
            of("compute_s"),
            {lane: statistics.median(one.hidden_s.get(lane, 0.0) for one in seen) for lane in lanes},
            of("any_hidden_s"),
            of("overhead_s"),
            int(of("num_issued")),
            of("pack_s"),
            of("unpack_s"),
            of("write_s"),
            int(of("num_written")),
        )


@dataclass(frozen=True)
class Backward:
    """A whole backward under a plan, as it was measured."""

    plan: Plan
    spread: Spread


@dataclass(frozen=True)
class Measurements:
    """All that was measured.

    Attributes:
        compute: of each module alone.
        gathers: how long compute waited for FSDP2's own all-gather, of each module that it gathers; empty where it does not.
        fsdp2_copied_bytes, fsdp2_copied_s: what FSDP2 gathered of them in a backward, and how long that took beside waiting:
            copies in and out.
        beside: None where communication could not be put beside compute.
        packed_bytes, unpacked_bytes: what the copies of `beside` carried.
        memory_bytes_per_s: how fast the host copies by itself, for what `beside` did not copy; None on a device.
        source: machine, versions and command, in lines.
        backwards: those from which all this is.
        notes: what a reader has to know.
    """

    table: ModuleTable
    compute: Mapping[str, Spread]
    gathers: Mapping[str, Spread]
    swept: Swept
    beside: Beside | None
    packed_bytes: int
    unpacked_bytes: int
    device: str
    name: str
    source: Sequence[str]
    notes: Sequence[str] = field(default_factory=list)
    backwards: Sequence[Backward] = ()
    fsdp2_copied_bytes: int = 0
    fsdp2_copied_s: float = 0.0
    memory_bytes_per_s: float | None = None


def profile_of(measured: Measurements) -> tuple[Profile, Comments]:
    """The profile, and what is to be said of its figures."""
    draft = _Draft(measured)
    profile = Profile.model_validate(draft.data)
    source = "\n".join([profile.source, *checks(measured.backwards, profile)])
    return Profile.model_validate(draft.data | {"source": source}), draft.comments


def checks(backwards: Sequence[Backward], profile: Profile) -> list[str]:
    """The backwards from which a profile was made, and what it says of them."""
    found = []
    for one in backwards:
        took = f"check: a backward under {one.plan.schedule} took {one.spread}"
        try:
            told_s = simulate(one.plan, costs(one.plan, profile)).duration_s
        except CommplanError as error:
            # What could not be measured is missing.
            found.append(f"{took}; {error}")
            continue
        found.append(f"{took}; this profile says {in_ms(told_s)} ms ({told_s / one.spread.median_s - 1:+.1%})")
    return found


class _Draft:
    """A profile in the making: its data, and what is said of it."""

    def __init__(self, measured: Measurements) -> None:
        self.comments: dict[tuple[str | int, ...], str] = {}
        self._measured = measured
        notes = [f"note: {note}" for note in measured.notes]
        self.data: dict[str, Any] = {
            "name": measured.name,
            "source": "\n".join([*measured.source, *notes]),
            "compute_s": self._compute(),
            "axes": self._axes(),
        }
        self.data["links"] = self._links()
        self.data["host"] = self._host()
        self.data["fsdp2_gathers"] = "blocking" if measured.device == "cpu" else "prefetched"

    def _compute(self) -> dict[str, Any]:
        compute = self._measured.compute
        self.comments["compute_s",] = (
            "Backward of each module with nothing else under way, a forward that is run again for it included: of ranks the\n"
            "slowest each time, for its peers wait for it; the median of backwards. Default: the median module that computed."
        )
        for name, spread in compute.items():
            self.comments["compute_s", "modules", name] = str(spread)
        computing = [spread for spread in compute.values() if spread.median_s > 0]
        default_s = statistics.median([spread.median_s for spread in computing] or [0.0])
        found: dict[str, Any] = {"default": default_s, "modules": {name: s.median_s for name, s in compute.items()}}
        if jitter := _jitter([spread.jitter for spread in computing]):
            found["jitter"] = jitter
            self.comments["compute_s", "jitter"] = _JITTER_IS.format("the median module")
        return found

    def _axes(self) -> dict[str, Any]:
        swept = self._measured.swept
        axes: dict[str, Any] = {}
        for axis in Axis:
            kinds = {kind: points for (of, kind), points in swept.points.items() if of is axis}
            if not kinds:
                continue
            costs: dict[str, Any] = {"link": SHARED_LINK if self._is_shared else str(axis)}
            axes[str(axis)] = costs
            for kind, points in kinds.items():
                costs[str(kind)] = self._transfer((str(axis), str(kind)), points)
                fastest = points[-1].size_bytes / max(points[-1].spread.median_s, 1e-12)
                self.comments["axes", str(axis), str(kind)] = (
                    f"{swept.dtypes[axis, kind]}; [bytes, seconds]; {fastest:.3g} bytes/s at the largest.\n"
                    "Of ranks the shortest, as a rule the last to arrive; of process groups the slowest; medians, made to rise."
                )
        if self._measured.gathers and Axis.SHARD in axes:
            axes[Axis.SHARD]["fsdp2_all_gather"] = self._gathers()
        return axes

    def _transfer(self, at: tuple[str, str], points: Sequence[Measured]) -> dict[str, Any]:
        line, said = rising_line([(point.size_bytes, point.spread.median_s) for point in points])
        for place, of in enumerate(said):
            self.comments["axes", *at, "points", place] = "; ".join(str(points[one].spread) for one in of)
        if len(line) == 1:
            # No more than the least that was to be measured: what little there is takes as long as nothing.
            return {"points": [[0, line[0][1]]]}
        return {"points": [list(point) for point in line]}

    def _gathers(self) -> dict[str, Any]:
        """How long compute waited for FSDP2's all-gathers, by their size."""
        by_size: dict[int, list[float]] = {}
        by_name = {module.name: module for module in self._measured.table.modules}
        for name, spread in self._measured.gathers.items():
            by_size.setdefault(by_name[name].gathered_bytes, []).append(spread.median_s)
        self.comments["axes", str(Axis.SHARD), "fsdp2_all_gather"] = (
            "How long compute waited for FSDP2's own all-gather of a module; of ranks the shortest, mostly the last to come."
        )
        line, _ = rising_line([(size, statistics.median(by_size[size])) for size in sorted(by_size)])
        if len(line) == 1:
            size_bytes, seconds = line[0]
            return {"bytes_per_s": min(max(size_bytes / max(seconds, 1e-12), 1.0), 1e24)}
        return {"points": [list(point) for point in line]}

    @property
    def _is_shared(self) -> bool:
        crowded = self._measured.swept.crowded
        return crowded is not None and crowded >= SHARED

    def _links(self) -> dict[str, Any]:
        crowded, beside = self._measured.swept.crowded, self._measured.beside
        names = dict.fromkeys(costs["link"] for costs in self.data["axes"].values())
        if not names:
            return {}
        said = []
        if crowded is not None:
            said.append(
                f"Beside the other axis' a collective took {crowded:.2f} times as long as alone, "
                + (
                    "so they share a link: twice as long if each wants all of it."
                    if self._is_shared
                    else "so they share nothing."
                )
            )
        else:
            said.append("Whether the axes share a link was not measured: there is one, or a collective was left out.")
        links: dict[str, dict[str, float]] = {name: {} for name in names}
        if self._is_shared and crowded is not None:
            # Two that want d each of a link take 2 d times as long.
            links[SHARED_LINK]["demand"] = min(1.0, crowded / 2)
        if beside is not None:
            slower = self._slowdown(beside)
            said.append(
                f"Compute took {in_ms(beside.compute_s)} ms with {in_ms(beside.any_hidden_s)} ms of communication beside it, "
                f"and {in_ms(beside.alone_s)} ms alone."
            )
            for link in links.values():
                link["slowdown"] = slower
        else:
            said.append("How much communication slows compute was not measured.")
        for name, link in links.items():
            if jitter := self._link_jitter(name):
                link["jitter"] = jitter
                self.comments["links", name, "jitter"] = _JITTER_IS.format("the median size of its collectives")
        self.comments["links",] = "\n".join(said)
        return links

    def _link_jitter(self, link: str) -> float:
        """The median of what was measured over this link."""
        axes = {axis for axis, costs in self.data["axes"].items() if costs["link"] == link}
        swept = self._measured.swept.points
        return _jitter([point.jitter for (axis, _), points in swept.items() if str(axis) in axes for point in points])

    def _slowdown(self, beside: Beside) -> float:
        # Collectives run beside hooks, too, which are no compute.
        part = beside.compute_s / max(beside.compute_s + beside.overhead_s, 1e-12)
        hidden = {lane: seconds * part for lane, seconds in beside.hidden_s.items()}
        if self._is_shared:
            hidden = {SHARED_LINK: beside.any_hidden_s * part}
        return round(slowdown(beside.alone_s, beside.compute_s, hidden, beside.any_hidden_s * part), 4)

    def _host(self) -> dict[str, Any]:
        beside = self._measured.beside
        copied = self._fsdp2_copies()
        if beside is None:
            self.comments["host",] = "Nothing else was measured." if copied else "Not measured."
            return copied
        packed = _speed(self._measured.packed_bytes, beside.pack_s)
        unpacked = _speed(self._measured.unpacked_bytes, beside.unpack_s)
        # What was done where nothing was to be copied has to count somewhere.
        uncopied_s = (beside.pack_s if packed is None else 0.0) + (beside.unpack_s if unpacked is None else 0.0)
        found: dict[str, Any] = {"issue_s": max(beside.overhead_s + uncopied_s, 0.0) / max(beside.num_issued, 1)}
        said = [
            f"Of a backward with {beside.num_issued} ops hooks took {in_ms(beside.overhead_s)} ms without waits and copies,",
            f"packing gradients {in_ms(beside.pack_s)} ms, unpacking parameters {in_ms(beside.unpack_s)} ms, writing to .grad "
            f"{in_ms(beside.write_s)} ms.",
        ]
        if packed is None:
            said.append("No gradient has to be packed: each is sent as it lies.")
        if unpacked is None:
            said.append("No parameter has to be unpacked: each is gathered in its place.")
        alone = self._measured.memory_bytes_per_s
        if alone is not None and None in (packed, unpacked):
            said.append("What buckets and pieces copy was measured by itself: fresh memory of the host.")
        found |= {"pack_bytes_per_s": packed or alone, "unpack_bytes_per_s": unpacked or alone}
        if self._measured.device == "cpu":
            found["packs_lone"] = False
        if beside.num_written:
            found["apply_s"] = beside.write_s / beside.num_written
        self.comments["host",] = "\n".join(said)
        return found | copied

    def _fsdp2_copies(self) -> dict[str, float]:
        copied_s = self._measured.fsdp2_copied_s
        speed = _speed(self._measured.fsdp2_copied_bytes, copied_s)
        if speed is None:
            return {}
        self.comments["host", "fsdp2_copy_bytes_per_s"] = (
            f"{in_ms(copied_s)} ms a backward in FSDP2's own gathering, waits left out"
        )
        return {"fsdp2_copy_bytes_per_s": speed}


def _jitter(measured: Sequence[float]) -> float:
    """The median, as far as a profile can say it: a few repeats may differ by any factor."""
    return round(min(statistics.median(measured or [0.0]), MAX_DEVIATION), 4)


def _speed(size_bytes: int, seconds: float) -> float | None:
    return size_bytes / seconds if size_bytes and seconds > 0 else None


def transfers(measured: Measurements) -> dict[tuple[Axis, Kind], float]:
    """Bytes per second of each collective at its largest size, for a summary."""
    return {key: p[-1].size_bytes / max(p[-1].spread.median_s, 1e-12) for key, p in measured.swept.points.items() if p}
