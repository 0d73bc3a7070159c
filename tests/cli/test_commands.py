"""The commands as a user meets them: exit codes, the shape of what is printed, and no traceback whatever they are given."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import commplan
from commplan import cli, compiler
from commplan.language import library
from commplan.language.modules import ModuleTable
from tests.cli.running import Run

GOOD = """\
version: 1
name: good
summary: For a test.
post_backward:
  - RS_n: {after: compute_n}
  - AR_n: {after: RS_n}
  - wait: RS_<n-1>
root:
  - apply_n: {after: AR_n}
"""
BAD = GOOD.replace("{after: RS_n}", "{afer: RS_n}")
FINDING = re.compile(r"^[^:\n]+:\d+:\d+: CP\d{3} .+", re.MULTILINE)


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commplan", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def write(name: str, content: str | bytes) -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


# check


def test_every_schedule_of_the_library_is_clean(run: Run) -> None:
    names = [name for name in library.names() if name != "blocking"]
    result = run("check", "--strict", *names)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"no errors in {len(names)} files\n"


def test_the_one_that_overlaps_nothing_is_told_so(run: Run) -> None:
    result = run("check", "blocking")
    assert result.code == 0
    assert [finding.split()[1] for finding in FINDING.findall(result.out)] == ["CP502", "CP502"]


def test_a_finding_begins_with_its_place_and_shows_the_line(run: Run) -> None:
    result = run("check", write("bad.yaml", BAD))
    assert result.code == 1
    head, line, caret, *_ = result.out.splitlines()
    assert re.match(r"bad\.yaml:6:\d+: CP0\d\d ", head)
    column = int(head.split(":")[2])
    assert line[8:] == "  - AR_n: {afer: RS_n}"
    assert caret[8:] == " " * (column - 1) + "^^^^"
    assert "did you mean after" in result.out.lower().replace("`", "").replace("'", "").replace('"', "")
    assert result.out.splitlines()[-1] == "1 error in 1 file"


def test_several_files_go_on_after_one_that_cannot_be_read(run: Run) -> None:
    result = run("check", "missing.yaml", write("bad.yaml", BAD), write("good.yaml", GOOD))
    assert result.code == 2
    assert result.out.startswith("error: cannot read 'missing.yaml': No such file")
    assert "\nbad.yaml:6:" in result.out
    assert result.out.endswith("1 error in 3 files, 1 of them unreadable\n")


def test_json_names_the_same_findings(run: Run) -> None:
    files = [write("bad.yaml", BAD), write("good.yaml", GOOD), "missing.yaml"]
    text, report = run("check", *files), run("check", *files, "--format", "json")
    assert report.code == text.code == 2
    data = json.loads(report.out)
    assert data["version"] == 1
    assert [entry["file"] for entry in data["files"]] == files
    places = [
        f"{f['file']}:{f['line']}:{f['column']}: {f['code']} {f['message']}" for e in data["files"] for f in e["findings"]
    ]
    assert places == FINDING.findall(text.out)
    assert data["summary"] == {"files": 3, "unreadable": 1, "errors": 1, "warnings": 0}


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--strict",), 1)])
def test_warnings_fail_only_when_strict(run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], code: int) -> None:
    spec = commplan.language.parse(GOOD, "good.yaml")
    warning = commplan.errors.Violation("CP501", "slow", spec.name_span, severity=commplan.errors.Severity.WARNING)
    monkeypatch.setattr(compiler, "check", lambda *_, **__: (warning,))
    result = run("check", write("good.yaml", GOOD), *flags)
    assert result.code == code
    assert result.out.endswith("1 warning in 1 file\n")


def test_a_param_applies_to_the_files_that_declare_it(run: Run) -> None:
    assert run("check", "blocking", "windowed_allreduce", "--set", "k=3").code == 0
    result = run("check", "blocking", "windowed_allreduce", "--set", "q=3")
    assert result.code == 2
    assert "no schedule here has a param 'q'" in result.err


def test_a_table_can_stand_for_the_number_of_modules(run: Run) -> None:
    table = write("table.json", ModuleTable.uniform(3).model_dump_json())
    assert run("check", "blocking", "--modules", table).code == 0
    assert run("plan", "blocking", "--modules", table).out == run("plan", "blocking", "--modules", "3").out


# standard input


def feed(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


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


# check against ranks and a cap


def rank_tables() -> tuple[str, str]:
    """Two modules over one axis each, and the same in the other order."""
    table = ModuleTable.uniform(2).model_dump(mode="json")
    embed, head = table["modules"]
    modules = [embed | {"axes": {"shard": 2}}, head | {"axes": {"replicate": 2}}]
    orders = (modules, modules[::-1])
    first, second = (write(f"r{i}.json", json.dumps(table | {"modules": order})) for i, order in enumerate(orders))
    return first, second


def test_tables_of_several_ranks_are_compared(run: Run) -> None:
    first, second = rank_tables()
    result = run("check", "single_lane", "--modules", first, "--modules", second)
    assert result.code == 1
    assert [finding.split()[1] for finding in FINDING.findall(result.out)] == ["CP302"]
    assert "a deadlock: rank 0 waits in RS_0 (module_0) for rank 1, which waits in AR_0 (module_1) for rank 0" in result.out
    assert run("check", "single_lane", "--modules", first, "--modules", first).code == 0


def test_how_many_collectives_are_in_flight_can_be_said(run: Run) -> None:
    tables = [argument for table in rank_tables() for argument in ("--modules", table)]
    assert "CP303" in run("check", "overlapped_allreduce", *tables).out
    assert run("check", "overlapped_allreduce", *tables, "--in-flight", "2").code == 0


@pytest.mark.parametrize(("cap", "code"), [("52MiB", 0), ("54525952", 0), ("54525951", 1), ("52MB", 1), ("1GiB", 0)])
def test_a_memory_cap_is_kept_or_an_error(run: Run, cap: str, code: int) -> None:
    result = run("check", "overlapped_allreduce", "--modules", "24", "--memory-cap", cap)
    assert result.code == code
    assert ("CP401" in result.out) == bool(code)


# plan


def test_plan_prints_every_op_once(run: Run) -> None:
    result = run("plan", "pipelined_allreduce", "--modules", "4")
    assert (result.code, result.err) == (0, "")
    for n in range(4):
        for family in ("RS", "AR", "apply"):
            assert re.search(rf"\b{family}_{n}\b", result.out), f"{family}_{n}"


def test_plan_json_reads_back(run: Run) -> None:
    result = run("plan", "delayed_allreduce", "--modules", "5", "--set", "k=3", "--json")
    plan = commplan.Plan.from_json(result.out)
    assert plan.digest == commplan.compile("delayed_allreduce", 5, k=3).digest
    assert plan.digest != commplan.compile("delayed_allreduce", 5, k=2).digest


def test_errors_of_plan_leave_standard_output_empty(run: Run) -> None:
    result = run("plan", write("bad.yaml", BAD), "--modules", "4", "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("bad.yaml:6:")


# list, explain, --version


def test_list_names_every_schedule_with_its_summary(run: Run) -> None:
    result = run("list")
    assert [line for line in result.out.splitlines() if not line.startswith(" ")] == list(library.names())
    assert "apply everything in root" in " ".join(result.out.split())
    assert max(map(len, result.out.splitlines())) <= 100


def test_explain_knows_every_rule(run: Run) -> None:
    listing = run("explain").out.splitlines()
    assert [line.split()[0] for line in listing] == sorted(compiler.RULES)
    for code, rule in compiler.RULES.items():
        result = run("explain", code.lower())
        assert result.code == 0
        assert result.out.startswith(f"{code} {rule.title}")
        assert "Wrong:" in result.out
        assert "Right:" in result.out


@pytest.mark.parametrize("columns", [30, 40, 80, 300])
def test_running_text_fits_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    paragraphs = run("explain", "CP201").out.split("Wrong:")[0].split("\n", 1)[1]
    for text in (run("list").out, paragraphs):
        assert min(columns, 100) - 20 < max(map(len, text.splitlines())) <= min(columns, 100)


def test_version(run: Run) -> None:
    assert run("--version").out == f"commplan {commplan.__version__}\n"


# whatever they are given

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


# as a process


def test_exit_codes_of_a_process(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    assert in_a_process("check", "blocking").returncode == 0
    assert in_a_process("check", str(bad)).returncode == 1
    missing = in_a_process("check", "missing.yaml")
    assert missing.returncode == 2
    assert "Traceback" not in missing.stdout + missing.stderr


def test_a_terminal_that_lacks_characters_is_no_fault(tmp_path: Path) -> None:
    schedule = tmp_path / "wide.yaml"
    schedule.write_text(BAD.replace("For a test.", "管道").replace("afer", "管"), encoding="utf-8")
    done = in_a_process("check", str(schedule), PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "fault in commplan" not in done.stderr
    assert "\\u7ba1" in done.stdout


@pytest.mark.parametrize("arguments", [("list",), ("explain",), ("schema",), ("plan", "blocking", "--modules", "500")])
def test_a_reader_that_stops_reading_is_no_fault_and_no_exit_code_of_ours(arguments: tuple[str, ...]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "commplan", *arguments]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "commplan", "check", "blocking"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "commplan: No space left on device\n")


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_only_on_a_terminal(tmp_path: Path, variables: dict[str, str], coloured: bool) -> None:
    schedule = tmp_path / "bad.yaml"
    schedule.write_text(BAD)
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLORTERM"}}
    command = [sys.executable, "-m", "commplan", "check", str(schedule)]
    process = subprocess.Popen(command, stdout=theirs, env=environment | {"TERM": "xterm-256color"} | variables)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # how a terminal says that its other end is closed
    os.close(ours)
    assert process.wait() == 1
    assert (re.search(rb"\x1b\[[\d;]*3\d", shown) is not None) is coloured
    assert b"\x1b" not in in_a_process("check", str(schedule)).stdout.encode()
