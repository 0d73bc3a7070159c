"""What a report says in words and figures, as filters of its template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from markupsafe import Markup

from commplan.picture.content import Difference, Section, stops
from commplan.picture.panels import Bar, Panel
from commplan.plan.model import Plan
from commplan.plan.text import blocks, size
from commplan.sight.explain import advice

MAX_STOPS_TOLD: Final = 2


def ms(seconds: float) -> str:
    """Seconds in milliseconds: one digit after the point, below 1 ms two, below 0.1 ms three."""
    value = seconds * 1e3
    digits = 1 if abs(value) >= 1 or value == 0 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f} ms"


def counted(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def signed_ms(seconds: float) -> str:
    """The same with a sign."""
    text = ms(abs(seconds))
    return text if seconds == 0 else f"{'+' if seconds > 0 else '-'}{text}"


def figure(value: float, is_bytes: bool) -> str:
    """Seconds or bytes."""
    return size(int(value)) if is_bytes else ms(value)


def difference(one: Difference) -> str:
    """Measured less predicted."""
    by = one.measured - one.predicted
    if not one.is_bytes:
        return signed_ms(by)
    return f"{'-' if by < 0 else '+'}{size(int(abs(by)))}" if by else "none"


def percent_off(one: Difference) -> str:
    """The same, of what was predicted."""
    if not one.predicted:
        return "-"
    if one.measured == one.predicted:
        return "0.0%"
    return f"{one.measured / one.predicted - 1:+.1%}"


def off_by(section: Section) -> str:
    """How much longer the slowest rank's backward took than predicted."""
    found = section.differences()
    return percent_off(found[0]) if found else "-"


def exposed_on(panel: Panel, lane: str) -> float | None:
    """Seconds exposed on one lane; None if nothing ran there."""
    return next((one.exposed_s for one in panel.told.lanes if one.lane == lane), None)


def length_bar(panel: Panel, longest_s: float) -> Markup:
    """A bar as long as the backward, of the longest: compute, and the part in which it stood still."""
    stood = panel.told.compute_wait_s
    parts = [100 * part / longest_s if longest_s else 0 for part in (panel.duration_s - stood, stood)]
    went_on, rest = (
        Markup('<i class="{}" style="--part: {:.2f}"></i>').format(*of) for of in zip(("", "rest"), parts, strict=True)
    )
    return Markup('<span class="length" aria-hidden="true">{}{}</span>').format(went_on, rest)


def cap_kept(section: Section, memory_cap_bytes: int) -> Markup:
    """Whether the plan declares no more than the cap."""
    over = section.declared_peak_bytes - memory_cap_bytes
    if over <= 0:
        return Markup('<span class="good">kept</span>')
    return Markup('<span class="bad">exceeded by {}</span>').format(size(over))


def verdict(section: Section) -> str:
    """What takes the time, in a sentence or two."""
    panel = section.first
    parts = []
    backward = f"{'Measured' if panel.is_measured else 'Predicted'} {ms(panel.duration_s)}"
    if section.alone_s and not panel.is_measured:
        backward += f", {panel.duration_s / section.alone_s:.3f} times compute alone ({ms(section.alone_s)})"
    parts.append(backward + ".")
    found = stops(panel)
    if found:
        told = [f"{ms(stop.seconds)} {_waiting(stop.what, stop.place)}" for stop in found[:MAX_STOPS_TOLD]]
        rest = sum(stop.seconds for stop in found[MAX_STOPS_TOLD:])
        if rest:
            told.append(f"{ms(rest)} elsewhere")
        parts.append(f"Compute stands still for {ms(panel.told.compute_wait_s)}: {', '.join(told)}.")
    else:
        parts.append("Compute never stands still.")
    measured = section.measured[0] if section.measured and not panel.is_measured else None
    if measured is not None:
        of_ranks = f", the slowest of {len(section.measured)} ranks" if len(section.measured) > 1 else ""
        parts.append(f"Measured {ms(measured.duration_s)}{of_ranks} ({off_by(section)}).")
    declared = section.declared_peak_bytes
    most = max(one.told.peak_bytes for one in section.panels)
    memory = f"{size(most)} of communication memory at most"
    parts.append(f"{memory}, {'as declared' if most == declared else f'{size(declared)} declared'}.")
    return " ".join(parts)


def _waiting(what: str, place: str) -> str:
    if what == "end of root":
        return "at the end of root, where nothing is left to hide behind"
    return f"waiting for {what} in {place}" if place else f"waiting at {what}"


def longest(panel: Panel, count: int) -> list[tuple[int, Bar]]:
    """The ops that were exposed for longest, each with its place among the bars."""
    place = {id(bar): index for index, bar in enumerate(panel.bars)}
    return [(place[id(bar)], bar) for bar in panel.exposed[:count]]


def advised(panel: Panel) -> list[tuple[str, str]]:
    """What to try against the reasons that are there: an example of each, of the op exposed for longest."""
    found: dict[str, str] = {}
    for bar in panel.exposed:
        for reason in bar.reasons:
            what = advice(reason)
            if what:
                found.setdefault(what, f"{bar.name}: {reason}")
    return [(reason, what) for what, reason in found.items()]


def plan_text(plan: Plan, max_parts: int | None) -> str:
    """The plan by hook; of more than `max_parts` hooks, and of more than thrice as many lines of a hook, the first ones and the
    last, and how many are left out between them.
    """
    head, *hooks = blocks(plan)
    if max_parts is not None:
        lines = [_cut(hook.split("\n"), 3 * max_parts, "  ... {} lines more ...") for hook in hooks]
        hooks = _cut(["\n".join(of) for of in lines], max_parts, "... {} hooks more: `commplan plan` prints all ...")
    return "\n\n".join([head, *hooks])


def _cut(parts: list[str], most: int, gap: str) -> list[str]:
    """At most so many of them, and one that says how many are missing."""
    missing = len(parts) - most
    if missing <= 0:
        return parts
    last = most // 2
    return [*parts[: most - last], gap.format(missing), *parts[len(parts) - last :]]


FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "advised": advised,
    "cap_kept": cap_kept,
    "counted": counted,
    "difference": difference,
    "exposed_on": exposed_on,
    "figure": figure,
    "length_bar": length_bar,
    "longest": longest,
    "ms": ms,
    "off_by": off_by,
    "percent_off": percent_off,
    "plan_text": plan_text,
    "signed_ms": signed_ms,
    "size": size,
    "stops": stops,
    "verdict": verdict,
}
