"""One HTML file of a report, which needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from commplan.errors import CommplanError
from commplan.ops import Axis
from commplan.picture.compact import compact
from commplan.picture.content import Content, Section
from commplan.picture.panels import OTHER, PACKING, Panel
from commplan.picture.words import FILTERS, counted, ms, plan_text
from commplan.plan.text import size

MAX_BYTES: Final = 1_000_000

SCRIPTS: Final = ("data.js", "view.js", "draw.js", "panel.js", "page.js")

FEW_SECTIONS: Final = 2
"""With so many schedules reasons are open from the start."""

KINDS: Final = {
    "compute": "compute",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "apply": "apply",
    PACKING: "packing",
    OTHER: "collective",
}


class TooLargeError(CommplanError):
    """A report would be larger than `MAX_BYTES` even with all left out that can be."""


@dataclass(frozen=True)
class Detail:
    """How much of a report is written, from all of it to what surely has room.

    Attributes:
        hooks: of each plan; None: all.
        exposed: rows of exposed ops of each panel, without JavaScript.
        ops: rows of ops predicted against measured.
        reasons: of so many ops of a panel a timeline can tell why they were exposed; None: of all.
        timelines: how many there are, of the fastest schedules; None: all.
    """

    hooks: int | None = None
    exposed: int = 40
    ops: int = 40
    reasons: int | None = None
    timelines: int | None = None


DETAILS: Final = (Detail(), Detail(16, 12, 20), Detail(8, 6, 10), Detail(8, 6, 10, reasons=20))
"""Tried one after the other; then timelines of the slowest schedules are left out."""


@dataclass(frozen=True)
class Page:
    """The file's text, and what was left out of it for its size, in sentences."""

    html: str
    left_out: tuple[str, ...]


def page(content: Content, made_by: str = "commplan", max_bytes: int = MAX_BYTES) -> Page:
    """The report as HTML, of `max_bytes` in UTF-8 at most. Where all has no room, part is left out, and the page says so.

    Raises:
        TooLargeError: not even one timeline has room.
    """
    for detail in DETAILS:
        made = _rendered(content, detail, made_by)
        if _size(made) <= max_bytes:
            return made
    # So many timelines as have room, by halving.
    detail, fits = DETAILS[-1], None
    low, high = 1, sum(len(section.panels) for section in content.sections) - 1
    while low <= high:
        middle = (low + high) // 2
        made = _rendered(content, replace(detail, timelines=middle), made_by)
        if _size(made) <= max_bytes:
            fits, low = made, middle + 1
        else:
            high = middle - 1
    if fits is None:
        smallest = _rendered(content, replace(detail, timelines=1), made_by)
        raise TooLargeError(
            f"the report would have {_size(smallest) / 1e6:.1f} MB with one timeline only, and may have "
            f"{max_bytes / 1e6:.1f} MB: give fewer schedules or modules; `commplan trace` writes timelines of any size"
        )
    return fits


def _size(made: Page) -> int:
    return len(made.html.encode())


def _rendered(content: Content, detail: Detail, made_by: str) -> Page:
    panels = [(number, panel) for number, section in enumerate(content.sections) for panel in section.panels]
    drawn = panels[: detail.timelines]
    numbers = iter(range(len(drawn)))
    numbers_of = [[next(numbers, None) for _ in section.panels] for section in content.sections]
    left_out = tuple(_left_out(content, detail, len(panels)))
    script = _script()
    html = (
        _environment()
        .get_template("report.html.j2")
        .render(
            content=content,
            made_by=made_by,
            job=list(_job(content)),
            kinds=_kinds(content),
            left_out=left_out,
            longest_s=max((panel.duration_s for _, panel in panels), default=0),
            few=len(content.sections) <= FEW_SECTIONS,
            detail=detail,
            numbers_of=numbers_of,
            shown_of=_num_shown,
            data=Markup(compact([p for _, p in drawn], [n for n, _ in drawn], content.memory_cap_bytes, detail.reasons)),
            script=Markup(script),
            script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )
    return Page(html, left_out)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("commplan.picture", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment


def _script() -> str:
    folder = files("commplan.picture") / "page"
    parts = [(folder / name).read_text(encoding="utf-8") for name in SCRIPTS]
    return "".join(["(() => {\n", '"use strict";\n', *parts, "})();"])


def _num_shown(section: Section) -> int:
    """Panels of a section that are shown at once: what is predicted, and the slowest rank; others are unfolded."""
    return min(len(section.panels), 2 if section.predicted is not None else 1)


def _kinds(content: Content) -> list[tuple[str, str]]:
    """What the legend explains."""
    there = {bar.kind for section in content.sections for panel in section.panels for bar in panel.bars}
    return [(kind, words) for kind, words in KINDS.items() if kind in there]


def _job(content: Content) -> Iterator[tuple[str, str]]:
    """What the report is about: words and what is to say."""
    if content.profile is not None:
        yield "profile", content.profile.name
        if content.profile.source:
            yield "from", content.profile.source
    tables = content.module_tables
    if len(tables) == 1:
        modules = tables[0].modules
        sizes = sorted({module.reduced_bytes for module in modules})
        each = (
            f"{size(sizes[0])} of gradients each" if len(sizes) == 1 else f"{size(sizes[0])} to {size(sizes[-1])} of gradients"
        )
        yield "modules", f"{len(modules)}, {each}"
        yield "mesh", _mesh(modules[0].axes)
    elif tables:
        yield "modules", ", ".join(str(len(table)) for table in tables)
    alone = {section.alone_s for section in content.sections if section.alone_s is not None}
    if len(alone) == 1:
        yield "compute alone", ms(alone.pop())
    measured = [panel for section in content.sections for panel in section.measured]
    if measured:
        yield "measured", f"{_runs(measured)}; each schedule by its slowest rank"
    if content.memory_cap_bytes is not None:
        yield "memory cap", size(content.memory_cap_bytes)


def _mesh(axes: dict[Axis, int]) -> str:
    return ", ".join(f"{axis} {ranks}" for axis, ranks in axes.items()) or "one rank"


def _runs(measured: Sequence[Panel]) -> str:
    ranks = {panel.told.rank for panel in measured}
    return f"{counted(len(measured), 'backward')} of {counted(len(ranks), 'rank')}"


def _left_out(content: Content, detail: Detail, num_panels: int) -> Iterator[str]:
    """What `detail` leaves out, for `content`, and where it is."""
    limit = f"To stay below {MAX_BYTES // 10**6} MB, "
    if detail.hooks is not None and any(_is_cut(section, detail.hooks) for section in content.sections):
        yield f"{limit}plans are shown with their first and last hooks and lines only: `commplan plan` prints them whole."
    if detail.reasons is not None and any(
        len(panel.exposed) > detail.reasons for section in content.sections for panel in section.panels
    ):
        yield (
            f"{limit}reasons are kept of the {detail.reasons} collectives of each timeline that were exposed for longest: "
            "`commplan simulate --format json` has all."
        )
    if detail.timelines is not None and detail.timelines < num_panels:
        yield (
            f"{limit}only the first {detail.timelines} of {num_panels} timelines are drawn: ask for fewer schedules, or "
            "`commplan trace`, which draws any number."
        )


def _is_cut(section: Section, max_parts: int) -> bool:
    return section.plan is not None and plan_text(section.plan, max_parts) != plan_text(section.plan, None)
