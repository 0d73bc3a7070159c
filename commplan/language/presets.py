"""Presets: sizes of a model, figures of a node of accelerators, each figure with the source that it is from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from commplan.errors import CommplanError
from commplan.language.profiles import ONE_LINE
from commplan.language.records import read_yaml
from commplan.language.source import did_you_mean, load_text, shown

MAX_PRESET_BYTES: Final = 64 * 1024

Value = TypeVar("Value", int, float)

Count = Annotated[int, Field(ge=1, le=2**31)]
Rate = Annotated[float, Field(ge=1, le=1e24, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1)]


class Figure(BaseModel, Generic[Value]):
    """A number, and the key of its source; `note` says how it follows from there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: Value
    source: Annotated[str, Field(min_length=1)]
    note: str = ""


class Preset(BaseModel):
    """What models and nodes share.

    Attributes:
        sources: key -> title and address.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=80, pattern=ONE_LINE)]
    sources: dict[str, Annotated[str, Field(min_length=1)]]

    def figures(self) -> Iterator[tuple[str, Figure[int] | Figure[float]]]:
        """Those that are given, by name."""
        for name in type(self).model_fields:
            if isinstance(found := getattr(self, name), Figure):
                yield name, found

    @model_validator(mode="after")
    def _sources_are_told(self) -> Preset:
        used = {figure.source for _, figure in self.figures()}
        for name, figure in self.figures():
            if figure.source not in self.sources:
                raise ValueError(
                    f"{name} is from {shown(figure.source)}, which `sources` has not: {self._offer(figure.source)}"
                )
        for source in self.sources:
            if source not in used:
                raise ValueError(f"no figure is from the source {shown(source)}: remove it")
        return self

    def _offer(self, source: str) -> str:
        return did_you_mean(source, self.sources) or "add it"


class ModelPreset(Preset):
    """A decoder as Llama 3's: grouped-query attention, a gated feed-forward of three matrices, RMSNorm, untied embeddings.

    Attributes:
        hidden, ffn: widths of a layer and of its feed-forward.
        heads, kv_heads: of queries, and of keys and values; a head is hidden / heads wide.
    """

    layers: Figure[Count]
    hidden: Figure[Count]
    ffn: Figure[Count]
    heads: Figure[Count]
    kv_heads: Figure[Count]
    vocabulary: Figure[Count]

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelPreset:
        if self.hidden.value % self.heads.value:
            raise ValueError(f"{self.heads.value} heads do not divide the width {self.hidden.value}")
        if self.heads.value % self.kv_heads.value:
            raise ValueError(f"{self.kv_heads.value} kv_heads do not divide the {self.heads.value} heads")
        return self


class NodePreset(Preset):
    """Accelerators that share a fast link, and what leads out of there.  A figure that is not given has no source yet.

    Attributes:
        devices: of a node.
        peak_flops: FLOP/s of a device in bf16, dense.
        hbm_bytes_per_s: of a device's memory.
        intra_bytes_per_s: what a device sends to the others of its node, each way, through a switch.
        intra_pair_bytes_per_s: instead, between two devices that are wired to one another, each way.
        inter_bytes_per_s: what a device sends out of the node, each way.
        base_latency_s, intra_latency_s, inter_latency_s: of a collective, and of each of its steps inside and between nodes.
        mfu: part of the peak that training is known to reach.
    """

    devices: Figure[Count]
    peak_flops: Figure[Rate] | None = None
    hbm_bytes_per_s: Figure[Rate] | None = None
    intra_bytes_per_s: Figure[Rate] | None = None
    intra_pair_bytes_per_s: Figure[Rate] | None = None
    inter_bytes_per_s: Figure[Rate] | None = None
    base_latency_s: Figure[Latency] | None = None
    intra_latency_s: Figure[Latency] | None = None
    inter_latency_s: Figure[Latency] | None = None
    mfu: Figure[Part] | None = None

    @model_validator(mode="after")
    def _is_switched_or_wired(self) -> NodePreset:
        if self.intra_bytes_per_s is not None and self.intra_pair_bytes_per_s is not None:
            raise ValueError("give intra_bytes_per_s (through a switch) or intra_pair_bytes_per_s (wired in pairs), not both")
        return self


Kind = TypeVar("Kind", ModelPreset, NodePreset)


def load_preset(name: str, kind: type[Kind], folder: Path) -> Kind:
    """The preset of this name in `folder`, or the one in the YAML file of this path.

    Raises:
        CommplanError: there is none, it can't be read, or something is wrong with it; names the place.
    """
    names = preset_names(folder)
    path = folder / f"{name}.yaml" if name in names else Path(name)
    if name not in names and path.suffix not in {".yaml", ".yml"}:
        raise CommplanError(f"there is no preset {shown(name)}: {did_you_mean(name, names)}; or give a YAML file of your own")
    text = load_text(path, MAX_PRESET_BYTES, "a preset")
    return read_yaml(text, str(path), kind, "a preset is a mapping: `version: 1`, a name, `sources` and figures")


def preset_names(folder: Path) -> tuple[str, ...]:
    """The presets of a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))
