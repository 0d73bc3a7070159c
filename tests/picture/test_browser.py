"""Reports in a browser: what is drawn, told and printed, in both themes, on a narrow screen, without JavaScript."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from demo_run import draw_report

from commplan.language import library
from commplan.picture import content, page
from tests.picture.asking import BARS, COLOR, NUM_COLORS, PIXEL, SELECTED, frame, rgb, told, view
from tests.picture.conftest import Open
from tests.picture.given import profile, run_like, simulated


class TestDrawn:
    def test_bars_have_the_colour_of_their_kind_where_they_ran(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        bars = opened.evaluate(BARS, 0)
        shown = [bar for bar in bars if bar["kind"] not in ("wait", "apply", "packing") and not bar["spans"]]
        assert {bar["kind"] for bar in shown} == {"compute", "reduce_scatter", "all_reduce"}
        for bar in shown:
            # Near its begin and its upper edge there is no label.
            time = bar["begin"] + 0.1 * (bar["end"] - bar["begin"])
            assert opened.evaluate(PIXEL, [0, time, 20 + 26 * bar["lane"] + 2]) == rgb(opened.evaluate(COLOR, bar["kind"]))

    def test_exposed_parts_are_marked_below_their_bar_and_hidden_ones_are_not(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        bars = opened.evaluate(BARS, 0)
        exposed = rgb(opened.evaluate(COLOR, "exposed"))
        spans = [(bar["lane"], span) for bar in bars for span in bar["spans"]]
        assert spans
        for lane, (begin, end) in spans:
            assert opened.evaluate(PIXEL, [0, (begin + end) / 2, 20 + 26 * lane + 22]) == exposed
        hidden = [bar for bar in bars if bar["kind"] == "all_reduce" and not bar["spans"]]
        for bar in hidden:
            assert opened.evaluate(PIXEL, [0, (bar["begin"] + bar["end"]) / 2, 20 + 26 * bar["lane"] + 22]) != exposed

    def test_timelines_are_drawn_when_they_come_into_view(self, open_page: Open, tmp_path: Path) -> None:
        path = tmp_path / "library.html"
        simulations = [simulated(name, 3) for name in library.names()]
        path.write_text(page(content(simulations, [], profile())).html, encoding="utf-8")
        opened = open_page(path)
        frame(opened)
        canvases = opened.query_selector_all("canvas")
        assert len(canvases) == len(library.names())
        assert canvases[0].evaluate(NUM_COLORS) > 5
        assert canvases[-1].evaluate(NUM_COLORS) == 1
        canvases[-1].scroll_into_view_if_needed()
        opened.wait_for_function("() => window.commplan.timelines.at(-1).isVisible")
        frame(opened)
        assert canvases[-1].evaluate(NUM_COLORS) > 5

    @pytest.mark.parametrize("ratio", [1, 2])
    def test_every_canvas_is_as_sharp_as_the_screen(self, open_page: Open, report: Path, ratio: int) -> None:
        opened = open_page(report, device_scale_factor=ratio)
        frame(opened)
        wide, shown = opened.evaluate(
            "() => { const one = document.querySelector('canvas'); return [one.width, one.clientWidth]; }"
        )
        assert wide == ratio * shown
        assert opened.query_selector("canvas").evaluate(NUM_COLORS) > 10


class TestTold:
    def test_hovering_tells_of_an_op_and_a_click_keeps_it(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        (bar,) = (bar for bar in opened.evaluate(BARS, 0) if bar["name"] == "AR_5" and bar["kind"] == "all_reduce")
        x = opened.evaluate("(time) => window.commplan.timelines[0].drawing.x(time)", (bar["begin"] + bar["end"]) / 2)
        place = {"x": x, "y": 20 + 26 * bar["lane"] + 8}
        opened.hover("#s0 canvas", position=place)
        tip = opened.inner_text("#tip")
        assert tip.startswith("AR_5")
        assert "; ".join(bar["why"]) in tip
        lines = opened.query_selector_all(".cursor")
        assert sum(line.is_visible() for line in lines) >= 2
        opened.click("#s0 canvas", position=place)
        assert opened.evaluate(SELECTED) == [0, "AR_5"]
        opened.mouse.move(2, 2)
        assert not opened.is_visible("#tip")
        assert told(opened).startswith("AR_5")

    def test_lists_lead_to_timelines(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        opened.evaluate("() => document.querySelectorAll('#s2 details').forEach((one) => { one.open = true; })")
        opened.click("#s2 table.exposed button.link >> nth=0")
        number, name = opened.evaluate(SELECTED)
        exposed = [bar for bar in opened.evaluate(BARS, number) if bar["exposed"] > 0]
        assert max(bar["exposed"] for bar in exposed) == pytest.approx(
            next(bar["exposed"] for bar in exposed if bar["name"] == name)
        )
        begin, end = view(opened)
        assert end - begin < 0.5 * 0.135
        assert opened.evaluate("() => document.activeElement === document.querySelector('#s2 canvas')")

    def test_a_list_that_was_cut_is_whole_on_demand(self, open_page: Open, tmp_path: Path) -> None:
        path = tmp_path / "long.html"
        path.write_text(page(content([simulated("blocking", 30)], [], profile())).html, encoding="utf-8")
        opened = open_page(path)
        assert len(opened.query_selector_all("table.exposed tbody tr")) == 40
        opened.click("text=Show all")
        rows = opened.query_selector_all("table.exposed tbody tr")
        assert len(rows) == 60
        assert all("compute waited for it" in row.inner_text() or "tail" in row.inner_text() for row in rows)

    def test_names_are_text_in_tips_too(self, open_page: Open, tmp_path: Path) -> None:
        one = simulated("blocking", 1)
        run = run_like(one)
        run.report.ops[0].op = "<img src=x onerror=alert(1)>"
        path = tmp_path / "hostile.html"
        path.write_text(page(content([], [run])).html, encoding="utf-8")
        opened = open_page(path)
        opened.focus("canvas")
        opened.keyboard.press("ArrowRight")
        opened.keyboard.press("ArrowDown")
        assert told(opened).startswith("<img src=x onerror=alert(1)> (blocking")
        x = opened.evaluate("() => window.commplan.timelines[0].drawing.x(window.commplan.panels[0].rows[1][0].begin)")
        opened.hover("canvas", position={"x": x + 3, "y": 20 + 26 + 8})
        assert opened.inner_text("#tip").startswith("<img src=x")
        assert opened.query_selector_all("img") == []


CONTRASTS = """() => {
  const probe = document.body.appendChild(document.createElement("span"));
  const value = (name) => {
    probe.style.color = `var(--${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((part) => {
      const of = part / 255;
      return of <= 0.03928 ? of / 12.92 : ((of + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [low, high] = [value(one), value(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const kinds = ["compute", "reduce_scatter", "all_reduce", "all_gather", "apply", "packing", "collective"];
  const found = {};
  for (const on of ["page", "card"]) {
    for (const name of ["text", "quiet", "accent", "exposed", "good"]) found[`text ${name} on ${on}`] = ratio(name, on) / 4.5;
  }
  for (const kind of kinds) {
    found[`text on ${kind}`] = ratio("on-bar", kind) / 4.5;
    found[`${kind} on card`] = ratio(kind, "card") / 3;
  }
  found["memory on card"] = ratio("memory", "card") / 3;
  probe.remove();
  return found;
}"""


class TestThemes:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast_is_enough_and_the_button_overrules_the_system(self, open_page: Open, report: Path, scheme: str) -> None:
        opened = open_page(report, color_scheme=scheme)
        found = opened.evaluate(CONTRASTS)
        assert {what: part for what, part in found.items() if part < 1} == {}
        paper = "() => getComputedStyle(document.body).backgroundColor"
        own = opened.evaluate(paper)
        other = "dark" if scheme == "light" else "light"
        while opened.inner_text("#theme") != f"Theme: {other}":
            opened.click("#theme")
        assert opened.evaluate(paper) != own
        frame(opened)
        card = rgb(opened.evaluate(COLOR, "card"))
        assert opened.evaluate(PIXEL, [0, 0.115, 30]) == card
        assert {what: part for what, part in opened.evaluate(CONTRASTS).items() if part < 1} == {}

    def test_it_follows_the_system(self, open_page: Open, report: Path) -> None:
        opened = open_page(report, color_scheme="light")
        light = opened.evaluate(PIXEL, [0, 0.115, 30])
        opened.emulate_media(color_scheme="dark")
        frame(opened)
        assert sum(opened.evaluate(PIXEL, [0, 0.115, 30])) < sum(light) / 3


def test_a_narrow_screen_does_not_scroll_sideways(open_page: Open, report: Path) -> None:
    opened = open_page(report, viewport={"width": 360, "height": 740})
    opened.evaluate("() => document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    frame(opened)
    assert opened.evaluate("() => document.documentElement.scrollWidth") <= 360
    assert (
        opened.evaluate(
            "() => Math.max(...[...document.querySelectorAll('canvas')].map((one) => one.getBoundingClientRect().right))"
        )
        <= 360
    )
    opened.click("#s0 canvas", position={"x": 150, "y": 28})
    assert told(opened).startswith("compute module_")


def test_on_paper_every_timeline_is_there_and_light(open_page: Open, report: Path) -> None:
    opened = open_page(report, color_scheme="dark", viewport={"width": 900, "height": 300})
    frame(opened)
    canvases = opened.query_selector_all("canvas")
    opened.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    unfolded = [canvas for canvas in canvases if canvas.evaluate("(one) => one.closest('details:not([open])') === null")]
    assert len(unfolded) == 5
    assert all(canvas.evaluate(NUM_COLORS) > 5 for canvas in unfolded)
    assert opened.evaluate(PIXEL, [0, 0.115, 30]) == [255, 255, 255]
    opened.emulate_media(media="print")
    assert not opened.is_visible("#in")
    assert opened.is_visible(".legend")
    assert not opened.is_visible("#details")
    opened.evaluate("() => window.dispatchEvent(new Event('afterprint'))")
    assert len(re.findall(rb"/Type\s*/Page\b", opened.pdf())) >= 2


def test_without_javascript_all_but_timelines_is_readable(open_page: Open, report: Path) -> None:
    opened = open_page(report, java_script_enabled=False)
    assert opened.is_visible("noscript p")
    assert not opened.is_visible("#in")
    assert not opened.is_visible(".drawing")
    assert opened.inner_text("#schedules").count("ms") > 9
    opened.click("#s0 summary:has-text('Why compute stood still (predicted)')")
    assert opened.is_visible("text=tail: nothing left to hide behind")
    opened.click("#s0 summary:has-text('Plan by hook')")
    assert "post_backward 0: gradients of module_0 are complete" in opened.inner_text("#s0 pre")


def test_the_picture_of_the_documents_is_of_a_report(browser: Any, tmp_path: Path) -> None:
    shown, drawn = Path(__file__).resolve().parents[2] / "docs" / "report.png", tmp_path / "drawn.png"
    draw_report.draw(browser, drawn)
    for picture in (shown, drawn):
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert [int.from_bytes(data[at : at + 4]) for at in (16, 20)] == list(draw_report.VIEWPORT.values())
    assert shown.stat().st_size < 200_000
