"""Whatever commands are given, from files or from standard input: one clear message, an exit code, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commplan import cli, compiler
from commplan.language.modules import ModuleTable
from tests.cli.running import BAD, FINDING, GOOD, Run, feed, write

# standard input


def test_a_schedule_can_come_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, GOOD)
    assert run("check", "-", "blocking").code == 0
    feed(monkeypatch, BAD)
    result = run("check", "-", "--format", "json")
    (report,) = json.loads(result.out)["files"]
    assert (result.code, report["file"], report["findings"][0]["file"]) == (1, "<stdin>", "<stdin>")
    feed(monkeypatch, GOOD)
    assert run("plan", "-", "--modules", "3").out == run("plan", write("good.yaml", GOOD), "--modules", "3").out
    feed(monkeypatch, GOOD)
    assert run("new", "copy", "--from", "-").code == 0
    assert Path("copy.yaml").read_text() == "# Begun as a copy of good.\n" + GOOD.replace("name: good", "name: copy")


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ("", 1, "<stdin>:1:1: CP003"),
        (b"\xff\xfe\0", 1, "<stdin>:1:1: CP002"),
        ("#" * (1 << 17), 1, "<stdin>:1:1: CP004"),
        ('{"format": "commplan.plan"}', 2, "<stdin> is a saved plan, not a schedule"),
    ],
)
def test_what_comes_from_standard_input_may_be_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, content: str | bytes, code: int, message: str
) -> None:
    feed(monkeypatch, content)
    result = run("check", "-")
    assert result.code == code
    assert message in result.out


@pytest.mark.parametrize("command", [("check",), ("plan", "--modules", "3"), ("new", "other", "--from")])
def test_a_saved_plan_is_not_taken_for_a_wrong_schedule(run: Run, command: tuple[str, ...]) -> None:
    saved = write("saved.json", run("plan", "blocking", "--modules", "3", "--json").out)
    result = run(*command, saved)
    assert result.code == 2
    assert "saved.json is a saved plan, not a schedule; `commplan diff` reads plans" in result.text


# wrong arguments and wrong files

TABLE = ModuleTable.uniform(2).model_dump()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "missing.yaml"), "cannot read 'missing.yaml': No such file"),
        (("check", "blokcing"), "did you mean blocking?"),
        (("check", "folder"), "cannot read 'folder': Is a directory"),
        (("check", "dangling.yaml"), "cannot read 'dangling.yaml': No such file"),
        (("check", "a\0b"), "error: "),
        (("check", "x" * 5000), "error: "),
        (("check", ""), "error: "),
        (("check",), "FILE"),
        (("check", "-", "-"), "only one file can be -"),
        (("check", "good.yaml", "--format", "xml"), "xml"),
        (("check", "good.yaml", "--set", "k"), "NAME=INTEGER"),
        (("check", "good.yaml", "--set", "k=two"), "NAME=INTEGER"),
        (("check", "good.yaml", "--set", "k=1.5"), "NAME=INTEGER"),
        (("check", "good.yaml", "--set", "=1"), "NAME=INTEGER"),
        (("check", "windowed_allreduce", "--set", "k=1", "--set", "k=2"), "'k' is set twice"),
        (("check", "windowed_allreduce", "--set", "k=0"), "1 to 32"),
        (("check", "windowed_allreduce", "--set", "k=33"), "1 to 32"),
        (("plan", "windowed_allreduce", "--modules", "3", "--set", "k=-1"), "1 to 32"),
        (("check", "good.yaml", "--set", "k=1"), "no schedule here has a param 'k'; there are none"),
        (("plan", "windowed_allreduce", "--modules", "4", "--set", "kk=1"), "did you mean k?"),
        (("plan", "windowed_allreduce", "--modules", "4", "--set", "modules=1"), "no schedule here has a param 'modules'"),
        (("check", "good.yaml", "--modules", "0"), "expected 1 to"),
        (("check", "good.yaml", "--modules", "-3"), "expected 1 to"),
        (("check", "good.yaml", "--modules", "9" * 5000), "expected 1 to"),
        (("check", "good.yaml", "--modules", "1.5"), "expected a number of modules or a module table"),
        (("check", "good.yaml", "--modules", ""), "expected a number of modules or a module table"),
        (("check", "good.yaml", "--modules", "a\0b"), "expected a number of modules or a module table"),
        (("check", "good.yaml", "--modules", "folder"), "folder"),
        (("check", "good.yaml", "--modules", "binary"), "binary"),
        (("check", "good.yaml", "--modules", "good.yaml"), "good.yaml:1:1: not JSON"),
        (("check", "good.yaml", "--modules", "list.json"), "list.json"),
        (("check", "good.yaml", "--modules", "empty.json"), "empty.json: modules"),
        (("check", "good.yaml", "--modules", "deep.json"), "deep.json"),
        (("check", "good.yaml", "--modules", "dtype.json"), "dtype.json: modules[0]"),
        (("check", "good.yaml", "--modules", "order.json"), "need_order"),
        (("check", "good.yaml", "--memory-cap", "2GiB"), "needs --modules"),
        (("check", "good.yaml", "--memory-cap", "2 gigs", "--modules", "3"), "expected a size above 0 as in 2GiB"),
        (("check", "good.yaml", "--memory-cap", "0", "--modules", "3"), "expected a size above 0 as in 2GiB"),
        (("check", "good.yaml", "--memory-cap", "9" * 5000, "--modules", "3"), "expected a size above 0"),
        (("check", "good.yaml", "--in-flight", "0"), "--in-flight"),
        (("check", "good.yaml", "--modules", "4", "--in-flight", "2"), "--in-flight"),
        (("check", "good.yaml", "--modules", "2", "--modules", "gone.json"), "gone.json"),
        (("plan", "good.yaml"), "--modules"),
        (("plan", "missing.yaml", "--modules", "3"), "cannot read 'missing.yaml'"),
        (("explain", "CP999"), "no rule has the code 'CP999'"),
        (("explain", "\x1b[31m"), "no rule has the code"),
        (("chekc", "good.yaml"), "chekc"),
        (("check", "good.yaml", "--frobnicate"), "--frobnicate"),
    ],
)
def test_wrong_usage_is_one_clear_message_and_exit_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    write("good.yaml", GOOD)
    write("binary", b"\x89PNG\r\n\x1a\n\0\0")
    write("list.json", "[1, 2]")
    write("empty.json", json.dumps(TABLE | {"modules": []}))
    write("deep.json", "[" * 100_000)
    write("dtype.json", json.dumps(TABLE | {"modules": [TABLE["modules"][0] | {"reduce_dtype": "float31"}]}))
    write("order.json", json.dumps(TABLE | {"need_order": [0, 0]}))
    Path("folder").mkdir()
    Path("dangling.yaml").symlink_to("nowhere")
    result = run(*arguments)
    assert result.code == 2, result.text
    assert message in result.text
    assert "fault in commplan" not in result.text
    assert "\x1b" not in result.text
    assert len(result.text) < 1500 + len("".join(arguments))


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\0\0",
        b"name: a\0b\n",
        "#" * (1 << 20),
        "",
        "\n\n",
        "# nothing\n",
        "[]",
        "just words",
        "a: [",
        "- \t- x",
        "&a [*a]",
        "!!python/object:os.system {}",
        "{" * 5000,
        "- " * 5000,
        GOOD.replace("version: 1", "version: 2"),
        GOOD.replace("RS_n", "RS_<n-99999999999999999999>"),
        GOOD.replace("post_backward", "post_backwards"),
        GOOD + GOOD,
        GOOD + "---\n" + GOOD,
        GOOD.replace("good", "\U0001f600" * 50),
        GOOD.replace("\n", "\r"),
        GOOD.replace("name: good", "name: &x good\nparams: *x"),
        "%YAML 9.9\n---\n" + GOOD,
    ],
)
@pytest.mark.parametrize("command", [("check",), ("plan", "--modules", "3")])
def test_no_text_is_a_fault_of_commplan(run: Run, command: tuple[str, ...], content: str | bytes) -> None:
    result = run(*command, write("some.yaml", content))
    assert result.code in {0, 1}
    assert "fault in commplan" not in result.text
    if result.code:
        assert FINDING.search(result.text)


def test_a_fault_of_commplan_is_two_lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("first\nsecond")

    monkeypatch.setattr(compiler, "check", broken)
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    result = run("check", "blocking")
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 2
    assert "report" in result.err
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "1")
    with pytest.raises(KeyError):
        cli.main(["check", "blocking"])
