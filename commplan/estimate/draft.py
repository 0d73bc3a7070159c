"""A profile from figures of a model and of nodes: what is computed from which of them is said beside each figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from commplan.errors import CommplanError
from commplan.estimate.formulas import (
    SOURCES,
    Work,
    head_backward_flops,
    layer_backward_flops,
    layer_parameters,
    num_steps,
    sent_part,
)
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.language.presets import Figure, ModelPreset, NodePreset
from commplan.language.profile_text import profile_text
from commplan.language.profiles import Profile
from commplan.language.records import validated
from commplan.ops import ITEMSIZE_BYTES, TRAITS, Axis, Kind

GIVEN: Final = "given"
"""Source of what the caller gives."""

EMBEDDING, HEAD = "tok_embeddings", "norm"
"""Names of the modules beside the layers, of which the second one holds norm and output, as torchtitan shards them."""

COLLECTIVES: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


@dataclass(frozen=True)
class Job:
    """What is to be planned.

    Attributes:
        shard, replicate: sizes of the mesh; ranks of one shard group are neighbours, from node to node.
        given: figures of the node by name, in place of the preset's.
        gather_dtype, reduce_dtype: of parameters in compute, and of gradients on their way.
        reshards: layers and embedding give their parameters back after forward.
    """

    model: ModelPreset
    node: NodePreset
    shard: int
    replicate: int
    work: Work
    given: Mapping[str, float] = field(default_factory=dict)
    gather_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    reshards: bool = True


@dataclass(frozen=True)
class Estimate:
    """A profile, its text with the formulas, and the module table of the model."""

    profile: Profile
    text: str
    table: ModuleTable


def estimate(job: Job) -> Estimate:
    """The profile of `job`.

    Raises:
        CommplanError: a figure of the node has no source and is not given, the mesh does not fit the nodes, or nothing sensible
            comes of the figures; says what to do.
    """
    draft = _Draft(job)
    profile = validated(draft.data(), Profile, draft.hint)
    return Estimate(profile, profile_text(profile, draft.comments), draft.table)


OPTIONS: Final[Mapping[str, str]] = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "peak_flops",
        "mfu",
        "intra_bytes_per_s",
        "inter_bytes_per_s",
        "base_latency_s",
        "intra_latency_s",
        "inter_latency_s",
        "hbm_bytes_per_s",
    )
}
"""Figures of a node that can be given -> the option that gives them."""


_MADE_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "compute_s": ("peak_flops", "mfu"),
    "bytes_per_s": ("intra_bytes_per_s", "inter_bytes_per_s"),
    "latency_s": ("base_latency_s", "intra_latency_s", "inter_latency_s"),
    "host": ("hbm_bytes_per_s",),
}
"""Part of a profile -> the figures that it is made of."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the groups of an axis lie: members on each node, and nodes."""

    members: int
    nodes: int

    @property
    def num_ranks(self) -> int:
        return self.members * self.nodes


class _Draft:
    """A profile in the making: its data, and what is said of it."""

    def __init__(self, job: Job) -> None:
        self.comments: dict[tuple[str | int, ...], str] = {}
        self._job = job
        self._cited: dict[str, None] = {}
        self._said: dict[str, str] = {}
        self._places = _places(job)
        self.table = ModuleTable(modules=tuple(self._modules()))

    def data(self) -> dict[str, Any]:
        """What `Profile` validates."""
        job = self._job
        compute = self._compute()
        axes = self._axes()
        host = self._host()
        # Last, since it lists what was used.
        source = "\n".join(self._source())
        name = f"{job.model.name}, {job.replicate} x {job.shard} devices, {job.node.name}"
        return {"name": name, "source": source, "compute_s": compute, "axes": axes, "host": host, "fsdp2_gathers": "prefetched"}

    def hint(self, at: Sequence[int | str]) -> str:
        """Of what the figure at this place of the profile is made: what is given of it, or all that can be."""
        made_of = next((options for part, options in _MADE_OF.items() if part in at), ())
        given = [name for name in made_of if name in self._job.given] or list(made_of)
        options = [OPTIONS[name] for name in given]
        if "compute_s" in at:
            options += ["--sequence", "--micro-batch"]
        return f"check {', '.join(options)}" if options else "check the names of the model and of the node"

    # Figures.

    def _figure(self, name: str) -> float:
        """A figure of the node, given or with a source."""
        job = self._job
        if name in job.given:
            self._said[f"{name}: {job.given[name]:g}"] = GIVEN
            return job.given[name]
        found = getattr(job.node, name)
        if found is None:
            raise CommplanError(
                f"the node {job.node.name!r} has no {name}, for which no source was found: give {OPTIONS[name]}"
            )
        self._say(job.node, name, found)
        return float(found.value)

    def _say(self, preset: ModelPreset | NodePreset, name: str, figure: Figure[int] | Figure[float]) -> None:
        note = f" ({figure.note})" if figure.note else ""
        self._said[
            f"{name}: {figure.value:g}{note}" if isinstance(figure.value, float) else f"{name}: {figure.value}{note}"
        ] = preset.sources[figure.source]

    def _cite(self, *keys: str) -> str:
        self._cited.update(dict.fromkeys(keys))
        return "[" + ", ".join(keys) + "]"

    # The model.

    def _modules(self) -> Iterator[Module]:
        """In the order in which gradients become complete."""
        model, width, vocabulary = self._job.model, self._job.model.hidden.value, self._job.model.vocabulary.value
        norm = Parameter(name="norm.weight", shape=(width,))
        output = Parameter(name="output.weight", shape=(vocabulary, width))
        yield self._module(HEAD, (norm, output), reshards=False)
        for layer in reversed(range(model.layers.value)):
            yield self._module(f"layers.{layer}", layer_parameters(model, layer, "float32"))
        yield self._module(EMBEDDING, (Parameter(name="tok_embeddings.weight", shape=(vocabulary, width)),))

    def _module(self, name: str, parameters: tuple[Parameter, ...], *, reshards: bool = True) -> Module:
        job = self._job
        return Module(
            name=name,
            parameters=parameters,
            axes={Axis.REPLICATE: job.replicate, Axis.SHARD: job.shard},
            reduce_dtype=job.reduce_dtype,
            gather_dtype=job.gather_dtype,
            resharded_after_forward=reshards and job.reshards,
        )

    def _compute(self) -> dict[str, Any]:
        job, work = self._job, self._job.work
        speed = self._figure("peak_flops") * self._figure("mfu")
        layer_flops, head_flops = layer_backward_flops(job.model, work), head_backward_flops(job.model, work)
        each = "6 (4, and 2 for the forward that is run again)" if work.recomputes else "4"
        sources = self._cite("kaplan", "palm", *(["megatron"] if work.recomputes else []))
        self.comments["compute_s",] = (
            f"FLOPs of backward / (peak_flops * mfu = {speed:.4g} FLOP/s), for {work.tokens} tokens {sources}. A layer has\n"
            f"{each} * tokens * (parameters of its matrices + 2 * sequence * hidden) = {layer_flops:.4g} FLOPs, norm with\n"
            f"the output 4 * tokens * hidden * vocabulary = {head_flops:.4g}. The embedding has no matrix product. Norms and\n"
            "whatever else takes time are in the mfu, and so are the parts of attention that a causal mask leaves out."
        )
        seconds = {HEAD: head_flops / speed, EMBEDDING: 0.0}
        return {"default": layer_flops / speed, "modules": seconds}

    # The network.

    def _axes(self) -> dict[str, Any]:
        axes: dict[str, Any] = {}
        for axis, place in self._places.items():
            link = "node" if place.nodes == 1 else "network"
            kinds = [kind for kind in COLLECTIVES if TRAITS[kind].axis is axis and place.num_ranks > 1]
            axes[str(axis)] = {"link": link} | {str(kind): self._transfer(axis, place, kind) for kind in kinds}
        return axes

    def _transfer(self, axis: Axis, place: _Place, kind: Kind) -> dict[str, float]:
        speed, how = self._speed(place)
        part = sent_part(kind, place.num_ranks)
        latency_s, how_long = self._latency_s(place, kind)
        formula = "2 * (n - 1) / n" if kind is Kind.ALL_REDUCE else "(n - 1) / n"
        self.comments["axes", str(axis), str(kind)] = (
            f"n = {place.num_ranks} ranks, {place.members} on each of {place.nodes} node(s). Each sends {formula} of the\n"
            f"tensor {self._cite('nccl')} at {speed:.4g} bytes/s: {how}.\nLatency: {how_long}."
        )
        return {"latency_s": latency_s, "bytes_per_s": speed / part}

    def _speed(self, place: _Place) -> tuple[float, str]:
        """Bytes a second that a rank sends to the others of its group, and why."""
        inside, how = float("inf"), ""
        if place.members > 1:
            inside, how = self._inside(place.members)
        if place.nodes == 1:
            return inside, how
        out = place.members * self._figure("inter_bytes_per_s")
        if inside < out:
            return inside, f"{how}, which is less than leaves the node"
        ports = "the port of its one member" if place.members == 1 else f"the ports of its {place.members} members"
        return out, f"inter_bytes_per_s, of each node through {ports}"

    @property
    def _pair(self) -> Figure[float] | None:
        """The wire between two devices of a node, where each has one to each other one; a speed that is given is a switch's."""
        return None if "intra_bytes_per_s" in self._job.given else self._job.node.intra_pair_bytes_per_s

    def _inside(self, members: int) -> tuple[float, str]:
        pair = self._pair
        if pair is None:
            return self._figure("intra_bytes_per_s"), "intra_bytes_per_s, through a switch"
        self._say(self._job.node, "intra_pair_bytes_per_s", pair)
        return (members - 1) * pair.value, f"intra_pair_bytes_per_s to each of the {members - 1} others at once"

    def _latency_s(self, place: _Place, kind: Kind) -> tuple[float, str]:
        """Of a ring that goes through all members of a node before it leaves for the next."""
        steps, between = num_steps(kind, place.num_ranks), num_steps(kind, place.nodes)
        if place.nodes == 1 and self._pair is not None:
            # All others are reached in one step.
            steps = num_steps(kind, 2)
        found = self._figure("base_latency_s")
        if inside := steps - between:
            found += inside * self._figure("intra_latency_s")
        if between:
            found += between * self._figure("inter_latency_s")
        return found, f"base_latency_s + {inside} * intra_latency_s + {between} * inter_latency_s {self._cite('ring')}"

    # The rest.

    def _host(self) -> dict[str, float]:
        job = self._job
        if "hbm_bytes_per_s" not in job.given and job.node.hbm_bytes_per_s is None:
            self.comments["host",] = "Copying is left out: hbm_bytes_per_s has no source, and is not given."
            return {}
        hbm = self._figure("hbm_bytes_per_s")
        reduced, gathered = ITEMSIZE_BYTES[job.reduce_dtype], ITEMSIZE_BYTES[job.gather_dtype]
        self.comments["host",] = (
            "Copies read and write memory at hbm_bytes_per_s: a gradient is packed from the gather dtype into the reduce\n"
            "dtype, a parameter is unpacked as it is. Issuing ops is not counted: the host runs ahead of a device."
        )
        return {"pack_bytes_per_s": hbm * reduced / (reduced + gathered), "unpack_bytes_per_s": hbm / 2}

    def _source(self) -> Iterator[str]:
        job, work = self._job, self._job.work
        yield "estimated with `commplan estimate`, nothing was measured: `commplan profile` does that on a job"
        recomputed = ", layers run their forward again" if work.recomputes else ""
        yield f"work of a rank: {work.micro_batch} row(s) of {work.sequence} tokens in a backward{recomputed}"
        yield f"dtypes: {job.gather_dtype} gathered, {job.reduce_dtype} reduced"
        for name, figure in job.model.figures():
            self._say(job.model, name, figure)
        self._say(job.node, "devices", job.node.devices)
        by_source: dict[str, list[str]] = {}
        for said, source in self._said.items():
            by_source.setdefault(source, []).append(said)
        for source, figures in by_source.items():
            yield f"- {'; '.join(figures)}"
            yield f"  {'as given by the caller' if source == GIVEN else f'from {source}'}"
        for key in self._cited:
            yield f"[{key}] {SOURCES[key]}"
        yield "not known, and taken as nothing: how much communication slows compute"


def _places(job: Job) -> dict[Axis, _Place]:
    """Where the groups of each axis lie.

    Raises:
        CommplanError: groups would lie in nodes in different ways.
    """
    devices, shard, replicate = job.node.devices.value, job.shard, job.replicate
    if min(shard, replicate) < 1:
        raise CommplanError(f"a mesh of {replicate} x {shard} devices has none: both sizes are at least 1")
    if shard * replicate <= devices:
        return {Axis.SHARD: _Place(shard, 1), Axis.REPLICATE: _Place(replicate, 1)}
    if shard % devices == 0:
        return {Axis.SHARD: _Place(devices, shard // devices), Axis.REPLICATE: _Place(1, replicate)}
    if devices % shard:
        raise CommplanError(
            f"shard groups of {shard} do not fit nodes of {devices} devices: take a divisor of {devices} or a multiple"
        )
    members = devices // shard
    if replicate % members:
        raise CommplanError(
            f"{replicate} replicas of {shard} devices do not fill nodes of {devices} devices: take a multiple of {members}"
        )
    return {Axis.SHARD: _Place(shard, 1), Axis.REPLICATE: _Place(members, replicate // members)}
