"""The commands as a user meets them: exit codes, and the shape of what is printed."""

from __future__ import annotations

import json
import re

import pytest

import commplan
from commplan import compiler
from commplan.language import library
from commplan.language.modules import ModuleTable
from tests.cli.running import BAD, FINDING, GOOD, Run, write

# check


def test_every_schedule_of_the_library_is_clean(run: Run) -> None:
    names = [name for name in library.names() if name not in ("blocking", "deferred_allreduce")]
    result = run("check", "--strict", *names)
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith(f"no errors in {len(names)} files\n")
    assert not FINDING.findall(result.out)


@pytest.mark.parametrize(("name", "codes"), [("blocking", ["CP502", "CP502"]), ("deferred_allreduce", ["CP503"])])
def test_those_that_overlap_nothing_are_told_so(run: Run, name: str, codes: list[str]) -> None:
    result = run("check", name)
    assert result.code == 0
    assert [finding.split()[1] for finding in FINDING.findall(result.out)] == codes


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
