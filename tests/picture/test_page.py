"""The HTML of a report: what is in it, what hostile names make of it, how large it is, and what it does without JavaScript."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import commplan
from commplan.language import library
from commplan.language.modules import Module, ModuleTable, Parameter
from commplan.ops import Axis
from commplan.picture import MAX_BYTES, TooLargeError, content, page
from commplan.picture.content import stops
from commplan.picture.words import plan_text
from commplan.plan.model import Plan
from commplan.plan.text import size
from commplan.sight.runs import Run
from commplan.simulate import report
from tests.picture.given import NUM_MODULES, profile, run_like, simulated

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}{% raw %}"


class Reader(HTMLParser):
    """Every element with its attributes, and text without that of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(*schedules: str, **options: int) -> Reader:
    return Reader(page(content([simulated(name) for name in schedules], [], profile(), **options)).html)


def test_the_table_reasons_and_plans_are_there_without_javascript() -> None:
    found = read("pipelined_allreduce", "blocking")
    for name in ("pipelined_allreduce", "blocking"):
        one = simulated(name)
        assert f"{one.duration_s * 1e3:.1f} ms" in found.text
        assert "exposed, replicate" in found.text
        assert f"{report(one).exposed_s('replicate') * 1e3:.1f} ms" in found.text
        assert " ".join(one.plan.text().split()) in found.text
    assert "tail: nothing left to hide behind" in found.text
    assert "try: smaller last modules" in found.text
    assert (
        "compute waited for it in post_backward of module_0 (AR_0, blocking.yaml:" in found.text
        or "compute waited" in found.text
    )
    assert "Timelines need JavaScript" in found.text
    assert ("noscript", {}) in found.elements


def test_nothing_is_asked_of_a_network() -> None:
    found = read("prefetch_overlap")
    addresses = [value for _, of in found.elements for key, value in of.items() if key in ("src", "href", "data", "action")]
    assert {address for address in addresses if not (address or "").startswith("#")} == {"data:,"}
    policy = next(of["content"] for tag, of in found.elements if of.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    program = found.scripts[-1]
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def named(name: str) -> Reader:
    """A report, predicted and measured, in which everything that somebody else names is called `name`."""
    axes = {Axis.REPLICATE: 2, Axis.SHARD: 2}
    weight = Parameter(name=name, shape=(64, 64))
    table = ModuleTable(modules=tuple(Module(name=f"{name}{n}", parameters=(weight,), axes=axes) for n in range(2)))
    one = simulated("blocking", table)
    one = replace(one, plan=replace(one.plan, schedule=name))
    run = run_like(one)
    run.report.ops[0].op = name
    run.report.ops[1].lane = name
    return Reader(page(content([one], [run], profile().model_copy(update={"name": name, "source": name}))).html)


def test_names_are_text_whatever_is_in_them() -> None:
    found, harmless = named(HOSTILE), named("harmless")
    assert [(tag, list(of)) for tag, of in found.elements] == [(tag, list(of)) for tag, of in harmless.elements]
    assert found.scripts[1:] == harmless.scripts[1:]
    words = "".join(found.words)
    assert words.count(HOSTILE) == "".join(harmless.words).count("harmless") > 20
    assert HOSTILE in json.loads(found.scripts[0])["strings"]


def test_a_cap_is_kept_or_not() -> None:
    peaks = {name: simulated(name).plan.peak_bytes for name in ("blocking", "pipelined_allreduce")}
    assert peaks["blocking"] < peaks["pipelined_allreduce"]
    found = read(*peaks, memory_cap_bytes=peaks["blocking"])
    over = size(peaks["pipelined_allreduce"] - peaks["blocking"])
    assert found.text.count(f"exceeded by {over}") == 1
    assert found.text.count("over the memory cap") == 1
    assert found.text.count("kept") == 1
    assert json.loads(found.scripts[0])["cap"] == peaks["blocking"]


class TestMeasured:
    def test_a_run_of_the_plan_is_compared_figure_by_figure(self) -> None:
        one = simulated("pipelined_allreduce")
        runs = [run_like(one, rank, times) for rank, times in enumerate((1.1, 1.25, 1.2))]
        (section,) = content([one], runs, profile()).sections
        assert [panel.told.rank for panel in section.measured] == [1, 2, 0]
        found = {difference.name: difference for difference in section.differences()}
        assert found["backward"].measured == pytest.approx(1.25 * found["backward"].predicted)
        for lane in ("shard", "replicate"):
            exposed = found[f"exposed, {lane}"]
            assert exposed.predicted == pytest.approx(report(one).exposed_s(lane))
            assert exposed.measured == pytest.approx(1.25 * exposed.predicted)
        peak = found["peak of communication memory"]
        assert peak.predicted == peak.measured == one.plan.peak_bytes
        ops = section.op_differences()
        assert {op.predicted.name for op in ops} == {op.op for op in runs[0].report.ops}
        longer_s = [op.longer_s for op in ops]
        assert longer_s == sorted(longer_s, key=lambda seconds: -abs(seconds))
        assert max(longer_s) == pytest.approx(0.25 * 0.008)
        text = Reader(page(content([one], runs, profile())).html).text
        assert "+25.0%" in text
        assert "2 more ranks" in text

    def test_lines_of_a_schedule_are_told_of_saved_runs_of_it(self) -> None:
        one = simulated("blocking")
        saved = Run.from_json(run_like(one).to_json())
        (alone,), (beside,) = (content(given, [saved], profile()).sections for given in ([], [one]))
        assert {stop.place for stop in stops(alone.measured[0])} == {"post_backward"}
        assert all(stop.place.startswith("post_backward, blocking.yaml:") for stop in stops(beside.measured[0]))

    def test_a_run_of_another_plan_is_beside_it_and_says_why(self) -> None:
        one, run = simulated("windowed_allreduce", k=1), run_like(simulated("windowed_allreduce", k=2))
        sections = content([one], [run], profile()).sections
        (ran,) = (section for section in sections if section.measured)
        assert ran.predicted is None
        assert ran.notes == (
            "What ran is not the plan that was simulated, so they are not compared: its params have other values.",
        )
        other = content([one], [run_like(simulated("windowed_allreduce", NUM_MODULES + 1, k=1))], profile())
        assert "it is for 7 modules, simulated were 6" in " ".join(note for section in other.sections for note in section.notes)
        assert "different models" in other.notes[0]

    def test_runs_alone_need_no_profile(self) -> None:
        run = run_like(simulated("blocking"))
        text = Reader(page(content([], [run])).html).text
        assert "rank 0 (replicate 0, shard 0), backward 7" in text
        assert "of compute" not in text
        bare = replace(run, report=replace(run.report, plan=None))
        text = Reader(page(content([], [bare])).html).text
        assert "saved without its plan" in text
        assert "waiting at step 3" in text


class TestSize:
    def test_the_whole_library_for_128_modules_has_room(self) -> None:
        simulations = [simulated(name, 128) for name in library.names()]
        made = page(content(simulations, [], profile(), 1 << 30))
        assert len(made.html.encode()) < MAX_BYTES
        panels = json.loads(Reader(made.html).scripts[0])["panels"]
        assert len(panels) == len(library.names())
        # Nothing but the middle of plans is left out.
        assert all("plans are shown with their first and last hooks and lines" in sentence for sentence in made.left_out)

    def test_what_has_no_room_is_left_out_and_named(self) -> None:
        simulations = [
            simulated(name) for name in ("blocking", "pipelined_allreduce", "overlapped_allreduce", "delayed_allreduce")
        ]
        given = content(simulations, [], profile())
        whole = page(given)
        assert whole.left_out == ()
        limit = len(whole.html.encode()) - 5_000
        made = page(given, max_bytes=limit)
        assert len(made.html.encode()) <= limit
        found = Reader(made.html)
        drawn = len(json.loads(found.scripts[0])["panels"])
        assert 1 <= drawn < 4
        assert any(f"only the first {drawn} of 4 timelines are drawn" in sentence for sentence in made.left_out)
        assert all(sentence in found.text for sentence in map(html.unescape, made.left_out))
        assert sum(tag == "canvas" for tag, _ in found.elements) == drawn
        # What is drawn are the fastest; all are in the table.
        assert all(name in found.text for name in (one.plan.schedule for one in simulations))

    def test_what_has_no_room_at_all_is_refused(self) -> None:
        with pytest.raises(TooLargeError, match=r"MB with one timeline only, and may have 0.0 MB: give fewer"):
            page(content([simulated("blocking")], [], profile()), max_bytes=20_000)

    def test_a_plan_is_cut_in_its_middle(self) -> None:
        plan: Plan = commplan.compile("blocking", 30)
        cut = plan_text(plan, 5)
        assert plan_text(plan, None) == plan.text().rstrip("\n")
        assert plan_text(plan, len(plan.hooks)) == plan_text(plan, None)
        root = plan_text(commplan.compile("pipelined_allreduce", 30), 4).partition("root: ")[2].split("\n")
        assert len(root) == 13
        assert root.count("  ... 21 lines more ...") == 1
        assert root[-1].split()[0] == "apply_29"
        assert re.findall(r"^post_backward (\d+)", cut, re.MULTILINE) == ["0", "1", "2", "29"]
        assert "root: " in cut
        assert "... 26 hooks more: `commplan plan` prints all ..." in cut


def test_a_long_source_is_folded_and_whole() -> None:
    sources = ("one line", "one line\nand a second <b>one</b>\nand a third")
    short, long = (
        Reader(page(content([simulated("blocking")], [], profile().model_copy(update={"source": source}))).html)
        for source in sources
    )
    assert " ".join(sources[1].split()) in long.text
    folded = [sum(tag == "details" for tag, _ in found.elements) for found in (short, long)]
    assert folded[1] == folded[0] + 1
