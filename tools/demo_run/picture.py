"""Timelines as an SVG for light and dark themes. Knows nothing of what ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

LANES: Final = ("compute", "shard", "replicate")
WAIT: Final = "wait"


@dataclass(frozen=True)
class Bar:
    """Something that ran on a lane, in seconds from the beginning of backward. `kind` is its lane, or WAIT."""

    lane: str
    kind: str
    label: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One backward."""

    title: str
    duration_s: float
    bars: tuple[Bar, ...]


WIDTH, LEFT, RIGHT = 880, 96, 78
BAR_HEIGHT, LANE_HEIGHT, TITLE_HEIGHT, GAP = 22, 28, 30, 16
NARROWEST_LABEL = 9.0

LIGHT: Final = {
    "card": "#ffffff",
    "edge": "#d0d7de",
    "text": "#1f2328",
    "quiet": "#59636e",
    "grid": "#e6eaef",
    "compute": "#b6c2cf",
    "shard": "#f2a65a",
    "replicate": "#6fb7a8",
    "on": "#1f2328",
    "wait": "#cf222e",
}
DARK: Final = {
    "card": "#0d1117",
    "edge": "#3d444d",
    "text": "#f0f6fc",
    "quiet": "#9198a1",
    "grid": "#21262d",
    "compute": "#8b98a6",
    "shard": "#e0924a",
    "replicate": "#58a394",
    "on": "#0d1117",
    "wait": "#ff7b72",
}


def style(colors: dict[str, str]) -> str:
    """The colours as CSS."""
    fills = "".join(f".{name}{{fill:{colors[name]}}}" for name in ("text", "quiet", "compute", "shard", "replicate", "on"))
    lines = f".grid{{stroke:{colors['grid']}}}.end{{stroke:{colors['text']}}}.wait{{stroke:{colors['wait']}}}"
    return f".card{{fill:{colors['card']};stroke:{colors['edge']}}}{fills}{lines}"


def draw(timelines: Sequence[Timeline], caption: Sequence[str]) -> str:
    """An SVG: the timelines below one another on one scale, for light and dark themes."""
    longest_s = max(timeline.duration_s for timeline in timelines)
    per_s = (WIDTH - LEFT - RIGHT) / longest_s
    panel = TITLE_HEIGHT + LANE_HEIGHT * len(LANES) + GAP
    bottom = GAP + panel * len(timelines)
    height = bottom + 54 + 18 * len(caption)
    step_s = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 1e9) if longest_s / s <= 9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"',
        ' font-family="-apple-system,Segoe UI,Helvetica,Arial,sans-serif" font-size="13">',
        f"<title>{escape('; '.join(f'{t.title}: {t.duration_s * 1e3:.0f} ms' for t in timelines))}</title>",
        f"<style>.title{{font-weight:600}}{style(LIGHT)}@media (prefers-color-scheme:dark){{{style(DARK)}}}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
    ]
    for tick in range(int(longest_s / step_s) + 1):
        x = LEFT + tick * step_s * per_s
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{GAP + TITLE_HEIGHT - 4}" y2="{bottom - 4}"/>')
        parts.append(_text(x, bottom + 12, f"{tick * step_s * 1e3:.0f}{' ms' if tick == 0 else ''}", "quiet", "middle"))
    for number, timeline in enumerate(timelines):
        parts += _panel(timeline, GAP + panel * number, per_s)
    parts += _legend(bottom + 38)
    parts += (_text(20, bottom + 64 + 18 * line, words, "quiet") for line, words in enumerate(caption))
    return "\n".join([*parts, "</svg>", ""])


def _panel(timeline: Timeline, top: float, per_s: float) -> Iterator[str]:
    yield _text(20, top + 16, timeline.title, "text title")
    top += TITLE_HEIGHT
    for row, lane in enumerate(LANES):
        y = top + row * LANE_HEIGHT
        yield _text(LEFT - 10, y + BAR_HEIGHT / 2 + 4.5, lane, "quiet", "end")
        for bar in sorted((b for b in timeline.bars if b.lane == lane), key=lambda b: b.kind == WAIT):
            yield _bar(bar, y, per_s)
    x = LEFT + timeline.duration_s * per_s
    end = top + LANE_HEIGHT * len(LANES) - 4
    yield f'<line class="end" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{end}"/>'
    yield _text(x + 6, top + BAR_HEIGHT / 2 + 4.5, f"{timeline.duration_s * 1e3:.0f} ms", "text title")


def _bar(bar: Bar, y: float, per_s: float) -> str:
    x, width = LEFT + bar.begin_s * per_s, max((bar.end_s - bar.begin_s) * per_s, 0.6)
    if bar.kind == WAIT:
        middle = y + BAR_HEIGHT / 2
        return f'<line class="wait" stroke-width="2" x1="{x:.1f}" x2="{x + width:.1f}" y1="{middle}" y2="{middle}"/>'
    drawn = f'<rect class="{bar.kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" rx="2"/>'
    if width < NARROWEST_LABEL * len(bar.label):
        return drawn
    return drawn + _text(x + width / 2, y + BAR_HEIGHT / 2 + 4.5, bar.label, "on", "middle")


def _legend(y: float) -> Iterator[str]:
    x = 20.0
    for name, words in (
        ("compute", "compute of module n"),
        ("shard", "reduce-scatter"),
        ("replicate", "all-reduce"),
        (WAIT, "compute waits for a collective"),
    ):
        if name == WAIT:
            yield f'<line class="wait" stroke-width="2" x1="{x}" x2="{x + 18}" y1="{y - 5}" y2="{y - 5}"/>'
        else:
            yield f'<rect class="{name}" x="{x}" y="{y - 11}" width="18" height="12" rx="2"/>'
        yield _text(x + 25, y, words, "text")
        x += 52 + 6.6 * len(words)


def _text(x: float, y: float, words: str, style_class: str, anchor: str = "start") -> str:
    return f'<text class="{style_class}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
