"""Schedules with every attribute of the language, mixed at random: the same for a seed, and always right."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import commplan
from commplan.errors import ScheduleError
from commplan.language.modules import ModuleTable

FUSE = ("fuse: {modules: 2}", "fuse: {modules: 3}", "fuse: {modules: 4, tail: 1}", "fuse: {bytes: 64}")
CHUNKS = ("chunks: 2", "chunks: 3", "chunks: 5")
OFFSETS = {0: "n", 1: "<n-1>", 2: "<n-2>"}


@dataclass(frozen=True)
class Mixture:
    """A schedule, and which of its reductions run in the last backward only."""

    text: str
    rs_is_last: bool
    ar_is_last: bool


def mixture(seed: int, tables: list[ModuleTable], dtypes: tuple[str, ...]) -> Mixture:
    """The first right schedule of a seed, for all of `tables`.

    Args:
        dtypes: what may be written as `dtype`.
    """
    for attempt in itertools.count():
        drawn = _draw(random.Random(f"{seed}/{attempt}"), dtypes)
        try:
            for table in tables:
                commplan.compile(drawn.text, table)
        except ScheduleError:
            continue
        return drawn
    raise AssertionError


def _draw(draw: random.Random, dtypes: tuple[str, ...]) -> Mixture:
    rs_is_last = draw.random() < 0.12
    ar_is_last = rs_is_last or draw.random() < 0.25
    lane = draw.choice(["", "", "lane: own", "lane: a"])
    rs_at, ar_at = draw.choice([(0, 0), (0, 0), (0, 1), (0, 2), (1, 1), (1, 2)])
    chunks = draw.choice(["", "", *CHUNKS])
    fuse = draw.choice(["", "", "", *FUSE])
    rs = [f"after: compute_{OFFSETS[rs_at]}", chunks, fuse, _dtype(draw, dtypes)]
    cut = draw.choice([chunks, chunks, *CHUNKS])
    ar = [f"after: RS_{OFFSETS[ar_at]}", cut, draw.choice(["", "", *FUSE]), _dtype(draw, dtypes), lane]
    rs.append("when: last_backward" * rs_is_last)
    ar.append("when: last_backward" * ar_is_last)
    # A bucket is issued with its last member, up to three hooks later.
    post = [f"wait: RS_<n-{rs_at + (4 if fuse else 1)}>", _line(f"RS_{OFFSETS[rs_at]}", rs)]
    root = []
    if draw.random() < 0.75:
        post.append(_line(f"AR_{OFFSETS[ar_at]}", ar))
    else:
        root.append(_line("AR_n", ["after: RS_n", *ar[1:]]))
    if not root and draw.random() < 0.3:
        post.append(_line(f"apply_<n-{ar_at + 3}>", [f"after: AR_<n-{ar_at + 3}>"]))
    else:
        root.append(_line("apply_n", ["after: AR_n", draw.choice(["", "", "lane: b"])]))
    pre = []
    if draw.random() < 0.5:
        cut = [draw.choice(["", "", "fuse: {modules: 2}"]), draw.choice(["", "", "chunks: 2"]), draw.choice(["", "lane: g"])]
        pre = [_line(f"AG_<n+{draw.choice([1, 1, 2])}>", cut), "wait: AG_n"]
    text = "version: 1\nname: mixture\nsummary: Whatever there is.\nlanes: {a: {}, b: {}, g: {}, own: {communicator: own}}\n"
    for section, lines in {"pre_backward": pre, "post_backward": post, "root": root}.items():
        if lines:
            text += f"{section}:\n" + "".join(f"  - {line}\n" for line in lines)
    return Mixture(text, rs_is_last, ar_is_last)


def _dtype(draw: random.Random, dtypes: tuple[str, ...]) -> str:
    return f"dtype: {draw.choice(dtypes)}" if dtypes and draw.random() < 0.3 else ""


def _line(op: str, attributes: list[str]) -> str:
    given = ", ".join(attribute for attribute in attributes if attribute)
    return f"{op}: {{{given}}}" if given else op
