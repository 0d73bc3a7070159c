"""The picture of a backward: what is drawn is what ran, to scale."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from demo_run.picture import LEFT, RIGHT, WAIT, WIDTH, Bar, Timeline, draw

BARS = (Bar("compute", "compute", "7", 0.0, 0.1), Bar("shard", "shard", "7", 0.1, 0.15), Bar("compute", WAIT, "", 0.1, 0.15))


@pytest.fixture(scope="module")
def drawn() -> ElementTree.Element:
    return ElementTree.fromstring(draw([Timeline("a < b", 0.2, BARS), Timeline("short", 0.1, BARS[:1])], ["first", "second"]))


def boxes(drawn: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    """(x, width) of the bars of a kind; the last is the legend's."""
    found = [e for e in drawn.iter() if e.get("class") == kind and e.get("width")]
    return [(float(e.get("x", "")), float(e.get("width", ""))) for e in found[:-1]]


def test_bars_are_to_scale_and_timelines_share_it(drawn: ElementTree.Element) -> None:
    per_s = (WIDTH - LEFT - RIGHT) / 0.2
    assert boxes(drawn, "compute") == [pytest.approx((LEFT, 0.1 * per_s), abs=0.1)] * 2
    assert boxes(drawn, "shard") == [pytest.approx((LEFT + 0.1 * per_s, 0.05 * per_s), abs=0.1)]


def test_waits_are_lines_and_not_boxes(drawn: ElementTree.Element) -> None:
    lines = [e for e in drawn.iter() if e.get("class") == WAIT]
    assert len(lines) == 2
    assert all(e.tag.endswith("line") for e in lines)


def test_words_are_escaped_and_all_there(drawn: ElementTree.Element) -> None:
    words = [e.text for e in drawn.iter() if e.tag.endswith("text")]
    assert {"a < b", "short", "200 ms", "100 ms", "first", "second", "7"} <= set(words)
    assert words.count("7") == 3


def test_a_label_that_does_not_fit_is_left_out() -> None:
    narrow = draw([Timeline("", 1.0, (Bar("shard", "shard", "8", 0.5, 0.501),))], [])
    assert ">8<" not in narrow
