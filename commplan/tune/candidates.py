"""The schedules that a search may choose from: one record each, and its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final

ROOT: Final = -1
"""Instead of an offset: in root."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a schedule does with each module. Offsets count modules: 1 is `<n-1>`.

    Attributes:
        reduce_scatter: offset of the RS.
        all_reduce: offset of the AR, at least that of the RS; or `ROOT`.
        apply: offset of the apply, at least that of the AR; or `ROOT`.
        inputs: a hook waits for the RS that was issued so many modules before.
        apply_first: applies stand ahead of the RS in their hook, so that they give back a shard before it takes one.
        rs_fuse, ar_fuse: modules in a bucket.
        tail: so many of the last modules are left out of buckets.
        rs_chunks, ar_chunks: pieces.
        gather: parameters are gathered so many modules ahead; 0: by FSDP2.
        gather_alone: on a lane of their own.
        single_lane: RS and AR share a lane.
    """

    reduce_scatter: int = 0
    all_reduce: int = 0
    apply: int = ROOT
    inputs: int = 1
    apply_first: bool = False
    rs_fuse: int = 1
    ar_fuse: int = 1
    tail: int = 0
    rs_chunks: int = 1
    ar_chunks: int = 1
    gather: int = 0
    gather_alone: bool = False
    single_lane: bool = False

    @property
    def is_bit_equal(self) -> bool:
        """Whether sums are rounded as FSDP2 rounds them, however many ranks there are."""
        return self.rs_fuse == self.ar_fuse == self.rs_chunks == self.ar_chunks == 1

    def neighbours(self) -> Iterator[Candidate]:
        """All that differ in one attribute."""
        for field in fields(self):
            for value in CHOICES[field.name]:
                if value != getattr(self, field.name):
                    yield replace(self, **{field.name: value})  # type: ignore[arg-type]

    def text(self, name: str, summary: str) -> str:
        """The schedule as YAML."""
        lanes = [*["comm: {priority: high}"] * self.single_lane, *["gather: {}"] * (self.gather_alone and self.gather > 0)]
        sections = {"pre_backward": self._pre(), "post_backward": self._post(), "root": self._root()}
        lines = ["version: 1", f"name: {name}", "summary: >-", *[f"  {line}" for line in summary.splitlines()]]
        if lanes:
            lines += ["", "lanes:", *[f"  {lane}" for lane in lanes]]
        for section, of_section in sections.items():
            if of_section:
                lines += ["", f"{section}:", *[f"  - {line}" for line in of_section]]
        return "\n".join(lines) + "\n"

    def _pre(self) -> list[str]:
        if not self.gather:
            return []
        ahead = f"AG_<n+{self.gather}>"
        return ["wait: AG_n", f"{ahead}: {{lane: gather}}" if self.gather_alone else ahead]

    def _post(self) -> list[str]:
        # A bucket is issued with its last member.
        waited = self.reduce_scatter + self.inputs + (self.rs_fuse - 1)
        reductions = [f"wait: RS_{_index(waited)}", self._line("RS", self.reduce_scatter, self.rs_fuse, self.rs_chunks)]
        if self.all_reduce != ROOT:
            reductions.append(self._line("AR", self.all_reduce, self.ar_fuse, self.ar_chunks))
        if self.apply == ROOT:
            return reductions
        at = _index(self.apply)
        applied = [f"apply_{at}: {{after: AR_{at}}}"]
        return [reductions[0], *applied, *reductions[1:]] if self.apply_first else [*reductions, *applied]

    def _root(self) -> list[str]:
        reductions = [self._line("AR", 0, self.ar_fuse, self.ar_chunks)] if self.all_reduce == ROOT else []
        return [*reductions, *["apply_n: {after: AR_n}"] * (self.apply == ROOT)]

    def _line(self, family: str, offset: int, fuse: int, chunks: int) -> str:
        at = _index(offset)
        attributes = [f"after: {'compute' if family == 'RS' else 'RS'}_{at}"]
        if fuse > 1:
            attributes.append(f"fuse: {{modules: {fuse}, tail: {self.tail}}}" if self.tail else f"fuse: {{modules: {fuse}}}")
        if chunks > 1:
            attributes.append(f"chunks: {chunks}")
        if self.single_lane:
            attributes.append("lane: comm")
        return f"{family}_{at}: {{{', '.join(attributes)}}}"


def _index(offset: int) -> str:
    return "n" if offset == 0 else f"<n-{offset}>"


CHOICES: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {
        "reduce_scatter": (0, 1, 2),
        "all_reduce": (0, 1, 2, 3, ROOT),
        "apply": (ROOT, 0, 1, 2, 3, 4, 6, 8),
        "inputs": (1, 2, 3),
        "apply_first": (False, True),
        "rs_fuse": (1, 2, 3, 4, 8),
        "ar_fuse": (1, 2, 3, 4, 8),
        "tail": (0, 1, 2),
        "rs_chunks": (1, 2, 4),
        "ar_chunks": (1, 2, 4),
        "gather": (0, 1, 2),
        "gather_alone": (False, True),
        "single_lane": (False, True),
    }
)
"""Attribute -> its values; the first is the plainest."""
