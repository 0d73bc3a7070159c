"""`commplan diff` as a user meets it: what it prints, what it takes, exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import commplan
from commplan.cli.difference import difference_json, difference_text
from commplan.language import library
from commplan.language.modules import ModuleTable
from commplan.plan.diff import diff
from tests.cli.running import BAD, GOOD, Run, feed

MOVED = """\
pipelined_allreduce -> overlapped_allreduce, 6 modules
+ added   - removed   > moved here   ^ other order   ~ changed

post_backward n, n = 0 to 4   peak at most 14.0 MiB
  > AR_n   from post_backward <n+1>; waits: none -> RS_n

post_backward 5   peak 16.0 MiB
  > AR_5   from root; waits: none -> RS_5

peak: 16.0 MiB in post_backward 5
waits: 12 -> 18
steps: 6 moved
"""
ALL = """\
blocking -> single_lane, 5 modules
+ added   - removed   > moved here   ^ other order   ~ changed

lanes
  - shard: priority normal
  - replicate: priority normal
  + comm: priority high

post_backward 0   peak 6.0 MiB
  - wait RS_0
  ~ RS_0   lane: shard -> comm
  ~ AR_0   lane: replicate -> comm

post_backward n, n = 1 to 4   peak at most 6.0 MiB -> 14.0 MiB
  - wait RS_n
  + wait RS_<n-1>
  ~ RS_n   lane: shard -> comm
  ~ AR_n   lane: replicate -> comm

root   peak none -> 14.0 MiB
  + wait RS_4
  > apply_n, n = 0 to 3   from post_backward n; waits: AR_n -> none
  > apply_4   from post_backward 4

peak communication memory: 6.0 MiB in post_backward 0 -> 14.0 MiB in post_backward 4 (+8.0 MiB)
waits: 10 -> 6
steps: 5 added, 5 removed, 5 moved, 10 changed
"""


def save(run: Run, name: str, *arguments: str) -> str:
    Path(name).write_text(run("plan", *arguments, "--json").out, encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("pipelined_allreduce", "overlapped_allreduce", "--modules", "6"), MOVED),
        (("blocking", "single_lane", "--modules", "5"), ALL),
    ],
)
def test_what_differs_is_told_hook_by_hook(run: Run, arguments: tuple[str, ...], text: str) -> None:
    result = run("diff", *arguments)
    assert (result.code, result.err) == (1, "")
    assert result.out == text


def test_as_many_modules_as_there_are_do_not_make_it_longer(run: Run) -> None:
    lengths = {run("diff", "blocking", "overlapped_allreduce", "--modules", str(n)).out.count("\n") for n in (8, 40)}
    assert len(lengths) == 1


@pytest.mark.parametrize("one", library.names())
@pytest.mark.parametrize("other", ["bucketed_pipeline_depth2", "delayed_allreduce"])
def test_lines_told_as_one_stand_for_each_change(one: str, other: str) -> None:
    found = diff(commplan.compile(one, 7), commplan.compile(other, 7))
    told = 0
    times = 1
    for line in difference_text(found).plain.split("\nlanes\n")[0].splitlines()[2:]:
        several = re.search(r", n = (\d+) to (\d+)(?=   |$)", line)
        repeated = int(several[2]) - int(several[1]) + 1 if several else 1
        if re.match(r"  [-+>^~] ", line):
            told += times * repeated
        elif line and not line.startswith(" "):
            times = repeated
    if not found.lanes:
        assert told == sum(len(hook.changes) for hook in found.hooks)


def test_no_difference(run: Run) -> None:
    result = run("diff", "pipelined_allreduce", "delayed_allreduce", "--set", "k=1", "--modules", "4")
    assert result.code == 0
    assert result.out == (
        "pipelined_allreduce -> delayed_allreduce k=1, 4 modules\n\nno difference: both run the same ops in the same way\n"
    )


def test_a_saved_plan_brings_its_modules(run: Run) -> None:
    saved = save(run, "old.json", "delayed_allreduce", "--modules", "5", "--set", "k=3")
    assert run("diff", saved, "delayed_allreduce", "--set", "k=3").code == 0
    result = run("diff", saved, "delayed_allreduce")
    assert result.code == 1
    assert result.out.startswith("delayed_allreduce k=3 -> delayed_allreduce k=2, 5 modules\n")
    assert run("diff", "delayed_allreduce", saved, "--set", "k=3").code == 0
    assert run("diff", saved, "delayed_allreduce", "--set", "k=3", "--modules", "4").out.count("5 -> 4 modules") == 1


def test_a_saved_plan_is_known_by_its_text(run: Run) -> None:
    saved = save(run, "old", "blocking", "--modules", "3")
    Path("indented.plan").write_text(json.dumps(json.loads(Path(saved).read_text()), indent=1))
    assert run("diff", saved, "blocking").code == 0
    assert run("diff", saved, "indented.plan").code == 0


def test_a_schedule_may_be_written_as_json(run: Run) -> None:
    lines = [{"RS_n": {"after": "compute_n"}}, {"AR_n": {"after": "RS_n"}}, {"apply_n": {"after": "AR_n"}}]
    Path("flow.yaml").write_text(json.dumps({"version": 1, "name": "flow", "post_backward": lines}))
    assert run("diff", "flow.yaml", "blocking", "--modules", "3").code == 1


def test_a_table_can_stand_for_the_number_of_modules(run: Run) -> None:
    Path("table.json").write_text(ModuleTable.uniform(4).model_dump_json())
    assert run("diff", "blocking", "eager_apply", "--modules", "table.json").out == (
        run("diff", "blocking", "eager_apply", "--modules", "4").out
    )


def test_json_holds_what_differs(run: Run) -> None:
    arguments = ("blocking", "single_lane", "--modules", "5")
    result = run("diff", *arguments, "--format", "json")
    data = json.loads(result.out)
    found = diff(commplan.compile("blocking", 5), commplan.compile("single_lane", 5))
    assert (result.code, data) == (1, difference_json(found))
    assert data["equal"] is False
    assert [data[side]["peak_bytes"] for side in ("before", "after")] == [found.before.peak_bytes, found.after.peak_bytes]
    assert [lane["lane"] for lane in data["lanes"]] == ["shard", "replicate", "comm"]
    by_hook = {hook["hook"]: hook for hook in data["hooks"]}
    assert by_hook["post_backward 2"]["changes"][1:3] == [
        {"change": "added", "op": None, "wait": ["RS_1"], "lane": None, "from": None, "fields": {}},
        {
            "change": "changed",
            "op": "RS_2",
            "wait": None,
            "lane": "comm",
            "from": None,
            "fields": {"lane": {"before": ["shard"], "after": ["comm"]}},
        },
    ]
    moved = [change for change in by_hook["root"]["changes"] if change["change"] == "moved"]
    assert [change["from"] for change in moved] == [f"post_backward {n}" for n in range(5)]


@pytest.mark.parametrize("name", library.names())
def test_json_without_a_difference(run: Run, name: str) -> None:
    result = run("diff", name, name, "--modules", "3", "--format", "json")
    data = json.loads(result.out)
    assert (result.code, data["equal"], data["hooks"], data["lanes"]) == (0, True, [], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("blocking", "eager_apply"), "say for how many modules"),
        (("blocking", "missing.yaml", "--modules", "3"), "cannot read 'missing.yaml'"),
        (("missing.json", "blocking"), "cannot read 'missing.json'"),
        (("blocking", "bad.yaml", "--modules", "3"), "bad.yaml:6:"),
        (("blokcing", "bad.yaml", "--modules", "3"), "did you mean blocking?"),
        (("text.json", "blocking"), "text.json is no valid plan: not JSON"),
        (("deep.json", "blocking"), "deep.json is no valid plan: not JSON"),
        (("binary.json", "blocking"), "binary.json is no valid plan: it is not UTF-8"),
        (("broken.json", "blocking"), "broken.json is no valid plan"),
        (("saved.json", "saved.json", "--modules", "3"), "both are saved plans"),
        (("saved.json", "saved.json", "--set", "k=1"), "no schedule here has a param 'k'"),
        (("blocking", "delayed_allreduce", "--modules", "3", "--set", "k=99"), "1 to 32"),
        (("blocking", "delayed_allreduce", "--modules", "3", "--set", "kk=1"), "did you mean k?"),
        (("a\0b", "blocking", "--modules", "3"), "error: "),
        (("blocking",), "B"),
    ],
)
def test_what_cannot_be_compared_is_exit_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    Path("bad.yaml").write_text(BAD)
    Path("text.json").write_text("no plan")
    Path("deep.json").write_text("[" * 100_000)
    Path("binary.json").write_bytes(b"\xff{}")
    saved = json.loads(Path(save(run, "saved.json", "blocking", "--modules", "3")).read_text())
    for hook in saved["hooks"]:
        hook["steps"] = []
    Path("broken.json").write_text(json.dumps(saved))
    result = run("diff", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "fault in commplan" not in result.err
    assert len(result.err) < 1500


@pytest.mark.parametrize("saved", [True, False])
def test_one_side_can_come_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
    Path("good.yaml").write_text(GOOD)
    text = run("plan", "good.yaml", "--modules", "3", "--json").out if saved else GOOD
    feed(monkeypatch, text)
    assert run("diff", "-", "good.yaml", "--modules", "3").code == 0


@pytest.mark.parametrize(("data", "message"), [(b'{"format": 1}', "<stdin> is no valid plan"), (b"\xff", "<stdin>:1:1: CP002")])
def test_what_comes_from_standard_input_may_be_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    feed(monkeypatch, data)
    result = run("diff", "blocking", "-", "--modules", "3")
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_standard_input_is_one_side_only(run: Run) -> None:
    result = run("diff", "-", "-", "--modules", "3")
    assert result.code == 2
    assert "only one file can be -" in result.err
