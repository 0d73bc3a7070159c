"""What `compile` and `check` take, and how they refuse the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commplan import CommplanError, ModuleTable, ScheduleError, compiler
from commplan.language import library, resolve


def test_modules_come_in_any_form(tmp_path: Path) -> None:
    table = ModuleTable.uniform(3)
    file = tmp_path / "table.json"
    file.write_text(table.model_dump_json())
    forms = [3, table, file, str(file), table.model_dump_json(), table.model_dump(mode="json")]
    assert len({compiler.compile("blocking", form).digest for form in forms}) == 1


def test_schedules_come_in_any_form() -> None:
    path = library.find("blocking")
    forms = ["blocking", path, str(path), path.read_text(), resolve("blocking")]
    assert len({compiler.compile(form, 3).digest for form in forms}) == 1


@pytest.mark.parametrize("modules", [0, -1, True, None, 1.5, "nowhere.json", "{", {}, [3]])
def test_what_is_no_table_is_refused(modules: Any) -> None:
    with pytest.raises(CommplanError):
        compiler.compile("blocking", modules)


def test_params_override_defaults_within_bounds() -> None:
    assert dict(compiler.compile("delayed_allreduce", 3, k=3).params) == {"k": 3}
    with pytest.raises(CommplanError, match="k"):
        compiler.compile("delayed_allreduce", 3, k=0)
    with pytest.raises(CommplanError, match="no param"):
        compiler.compile("delayed_allreduce", 3, l=1)


def test_compile_raises_errors_and_no_warnings() -> None:
    text = "version: 1\nname: t\npost_backward:\n  - AR_n: {after: RS_n}\n  - RS_n\nroot:\n  - apply_n\n"
    assert [violation.code for violation in compiler.check(text)] == ["CP501", "CP201"]
    with pytest.raises(ScheduleError) as raised:
        compiler.compile(text, 3)
    assert [violation.code for violation in raised.value.violations] == ["CP201"]


def test_check_reports_a_file_that_does_not_parse() -> None:
    assert {violation.code[:3] for violation in compiler.check("version: 1\nname: [\n")} == {"CP0"}
