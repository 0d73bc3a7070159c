"""Params bound to values, and schedules found by name, path or text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.errors import CommplanError, ScheduleError
from commplan.language import bind_params, library, parse, resolve

TEXT = """\
version: 1
name: bound
params:
  k: {default: 2, min: 1, max: 8}
  c: 4
post_backward:
  - RS_n: {after: compute_n, chunks: c}
  - AR_<n-k>: {after: RS_<n-k>}
root:
  - apply_n: {after: AR_n}
"""
SPEC = parse(TEXT)


@given(st.dictionaries(st.sampled_from(["k", "c"]), st.integers(-3, 2000)))
def test_values_within_the_bounds_are_taken_and_others_refused(overrides: dict[str, int]) -> None:
    bounds = {"k": range(1, 9), "c": range(1, 1025)}
    wrong = [name for name, value in overrides.items() if value not in bounds[name]]
    if wrong:
        with pytest.raises(CommplanError) as caught:
            bind_params(SPEC, overrides)
        assert all(f"param {name}: expected" in str(caught.value) for name in wrong)
    else:
        assert bind_params(SPEC, overrides) == {"k": 2, "c": 4} | overrides
        assert list(bind_params(SPEC, overrides)) == ["k", "c"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kk": 1}, "did you mean k?"),
        ({"k": 2.0}, "expected an integer"),
        ({"k": "2"}, "expected an integer"),
        ({"k": True}, "expected an integer"),
        ({"k": None}, "expected an integer"),
        ({"k": 10**5000}, "expected 1 to 8"),
    ],
)
def test_what_is_no_value_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CommplanError) as caught:
        bind_params(SPEC, overrides)
    assert message in str(caught.value)


def test_a_bound_not_written_follows_from_the_use() -> None:
    assert {p.name: (p.minimum, p.maximum) for p in SPEC.params} == {"k": (1, 8), "c": (1, None)}
    with pytest.raises(ScheduleError, match="CP021"):
        parse(TEXT.replace("c: 4", "c: 0"))


def test_every_schedule_of_the_library_is_sound() -> None:
    names = library.names()
    assert "pipelined_allreduce" in names
    for name in names:
        assert resolve(name).name == name
        assert library.find(name).name == f"{name}.yaml"


def test_a_schedule_is_a_name_a_path_a_text_or_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT, encoding="utf-8")
    assert resolve(TEXT) == SPEC
    assert resolve(SPEC) is SPEC
    assert resolve(path).file == str(path)
    assert resolve(str(path)) == resolve(path)


@pytest.mark.parametrize("name", ["pipelined_alreduce", "", "a\0b", "x" * 5000, "no/such.yaml", "../schedules", "version: 1"])
def test_no_such_schedule(name: str) -> None:
    with pytest.raises(CommplanError):
        resolve(name)


def test_a_misspelt_name_is_mended() -> None:
    with pytest.raises(CommplanError, match=r"did you mean pipelined_allreduce\?"):
        resolve("pipelined_alreduce")
