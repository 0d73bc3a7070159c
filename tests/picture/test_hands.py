"""Reports in a browser: what mouse, touch and keyboard do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.picture.asking import BARS, SELECTED, frame, told, view
from tests.picture.conftest import Open


class TestZoom:
    def test_buttons(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        whole = view(opened)
        assert "all" in opened.inner_text("#range")
        opened.click("#in")
        begin, end = view(opened)
        assert whole[0] < begin < end < whole[1]
        assert opened.inner_text("#range") == f"{begin * 1e3:.1f} ms to {end * 1e3:.1f} ms"
        opened.click("#out")
        assert view(opened) == pytest.approx(whole)
        opened.click("#in")
        opened.click("#fit")
        assert view(opened) == pytest.approx(whole)

    def test_the_wheel_zooms_about_the_pointer_with_control_and_otherwise_scrolls(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        whole = view(opened)
        opened.hover("#s0 canvas", position={"x": 500, "y": 60})
        opened.mouse.wheel(0, 40)
        frame(opened)
        assert view(opened) == whole
        opened.evaluate("() => scrollTo(0, 0)")
        opened.hover("#s0 canvas", position={"x": 500, "y": 60})
        time = "() => window.commplan.timelines[0].drawing.time(500)"
        before = opened.evaluate(time)
        opened.keyboard.down("Control")
        opened.mouse.wheel(0, -200)
        opened.keyboard.up("Control")
        opened.wait_for_function("(end) => window.commplan.view.end < end", arg=whole[1])
        begin, end = view(opened)
        assert end - begin < 0.6 * (whole[1] - whole[0])
        assert opened.evaluate(time) == pytest.approx(before, abs=(end - begin) / 300)

    def test_dragging_pans_all_timelines(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        opened.click("#in")
        opened.click("#in")
        begin, end = view(opened)
        box = opened.query_selector("#s0 canvas").bounding_box()
        x, y = box["x"] + 600, box["y"] + 60
        opened.mouse.move(x, y)
        opened.mouse.down()
        opened.mouse.move(x - 200, y, steps=4)
        opened.mouse.up()
        later = view(opened)
        per_pixel = (end - begin) / opened.evaluate(
            "() => { const { right, left } = window.commplan.timelines[0].drawing; return right - left; }"
        )
        assert later == pytest.approx((begin + 200 * per_pixel, end + 200 * per_pixel), rel=0.02)
        assert opened.evaluate(SELECTED) is None

    def test_two_fingers_zoom(self, open_page: Open, report: Path) -> None:
        opened = open_page(report, has_touch=True)
        whole = view(opened)
        box = opened.query_selector("#s0 canvas").bounding_box()
        session = opened.context.new_cdp_session(opened)
        y = box["y"] + 60

        def touch(kind: str, *xs: float) -> None:
            points = [{"x": box["x"] + x, "y": y, "id": number} for number, x in enumerate(xs)]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", 500, 600)
        for apart in (60, 80, 100, 140):
            touch("touchMove", 550 - apart, 550 + apart)
        touch("touchEnd")
        begin, end = view(opened)
        assert end - begin < 0.6 * (whole[1] - whole[0])
        assert opened.evaluate(SELECTED) is None


class TestKeyboard:
    def test_tab_leads_to_a_timeline_and_arrows_to_its_ops(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        opened.focus("#help")
        opened.keyboard.press("Tab")
        assert opened.evaluate("() => document.activeElement.tagName") == "CANVAS"
        assert opened.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"
        opened.keyboard.press("ArrowRight")
        assert "compute module_0 (pipelined_allreduce, predicted). Takes 10.0 ms, from 0.0 ms to 10.0 ms." in told(opened)
        opened.keyboard.press("ArrowDown")
        assert "RS_0 (pipelined_allreduce, predicted)" in told(opened)
        assert "Reduce-scatter on lane shard, of module_0, 4.0 MiB. Hidden behind compute." in told(opened)
        opened.keyboard.press("ArrowRight")
        assert told(opened).startswith("RS_1")
        opened.keyboard.press("End")
        opened.keyboard.press("ArrowDown")
        assert told(opened).startswith("AR_")
        opened.keyboard.press("Escape")
        assert told(opened).startswith("Select an op")
        region = opened.query_selector("#details")
        assert (region.get_attribute("aria-live"), region.get_attribute("role")) == ("polite", "status")

    def test_e_goes_round_the_exposed_ops_and_tells_why(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        exposed = [bar for bar in opened.evaluate(BARS, 0) if bar["exposed"] > 0]
        opened.focus("#s0 canvas")
        seen = []
        for _ in exposed:
            opened.keyboard.press("e")
            seen.append(told(opened))
        assert {text.split(" ")[0] for text in seen} == {bar["name"] for bar in exposed}
        assert all("Exposed for" in text for text in seen)
        assert all(any("; ".join(bar["why"]) in text for text in seen) for bar in exposed)
        opened.keyboard.press("e")
        assert told(opened) == seen[0]
        opened.keyboard.press("Shift+E")
        assert told(opened) == seen[-1]
        opened.keyboard.press("Enter")
        begin, end = view(opened)
        assert begin < exposed[-1]["begin"] < exposed[-1]["end"] < end

    def test_zoom_pan_and_help(self, open_page: Open, report: Path) -> None:
        opened = open_page(report)
        whole = view(opened)
        opened.keyboard.press("+")
        opened.keyboard.press("+")
        begin, end = view(opened)
        assert end - begin < 0.5 * (whole[1] - whole[0])
        opened.keyboard.press("ArrowRight")
        assert view(opened)[0] == pytest.approx(begin + 0.1 * (end - begin))
        opened.keyboard.press("ArrowLeft")
        opened.focus("#s0 canvas")
        opened.keyboard.press("Shift+ArrowRight")
        assert view(opened)[0] == pytest.approx(begin + 0.2 * (end - begin))
        opened.keyboard.press("0")
        assert view(opened) == pytest.approx(whole)
        opened.keyboard.press("?")
        assert opened.is_visible("#keys")
        assert "zoom to the op" in opened.inner_text("#keys")
        opened.keyboard.press("Escape")
        assert not opened.is_visible("#keys")
        assert opened.evaluate("() => document.activeElement.tagName") == "CANVAS"
