"""Names of ops: `str` and `parse` are inverses, and nothing else is a name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan.errors import Span
from commplan.language.refs import NAME_PATTERN, RefError, is_ref, parse_index, parse_ref
from commplan.language.spec import Index, Number, OpRef
from commplan.ops import FAMILY_PATTERN, KIND_OF_FAMILY, OpId

families = st.sampled_from(sorted(KIND_OF_FAMILY)) | st.from_regex(FAMILY_PATTERN, fullmatch=True)
distances = st.builds(lambda value: Number(value=value), st.integers(1, 10**18)) | st.builds(
    lambda param: Number(param=param), st.from_regex(NAME_PATTERN, fullmatch=True)
)
indices = (
    st.just(Index())
    | st.just(Index(every=True))
    | st.builds(lambda sign, distance: Index(sign=sign, distance=distance), st.sampled_from([-1, 1]), distances)
)


@given(indices)
def test_index_and_its_text_are_inverses(index: Index) -> None:
    assert parse_index(str(index)) == index


@given(families, indices)
def test_ref_and_its_text_are_inverses(family: str, index: Index) -> None:
    ref = OpRef(family=family, index=index, span=Span("f", 3, 4))
    again = parse_ref(str(ref), ref.span)
    assert again == ref
    assert str(again) == str(ref)


@given(st.text(alphabet="ARSn_<>-+*k0123456789 ", max_size=12))
def test_a_text_is_a_name_or_refused_with_a_hint(text: str) -> None:
    # The grammar once more, written another way.
    head, _, tail = text.rpartition("_")
    words = head.split("_")
    family = bool(head) and all(re.fullmatch("[A-Za-z][A-Za-z0-9]*", word) for word in words)
    offset = re.fullmatch(r"<n[-+](\d+|[A-Za-z]\w*)>", tail)
    index = tail in ("n", "<n>", "*") or (offset is not None and not re.fullmatch("0[0-9]+", offset[1]))
    if index and "<" in text and not text.endswith(">"):
        index = False
    if re.fullmatch(r"<n[-+][A-Za-z]\w*_\w*>", text[text.find("<") :]):
        return  # a param with an underscore: the last underscore is not the one before the index
    assert is_ref(text) == (family and index)
    if not is_ref(text):
        with pytest.raises(RefError) as caught:
            parse_ref(text)
        assert caught.value.hint


@pytest.mark.parametrize("text", ["RS_<n-0>", "RS_<n+0>", "RS_<n>", "RS_n"])
def test_no_offset_is_written_in_four_ways(text: str) -> None:
    assert str(parse_ref(text)) == "RS_n"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("RS", "RS_n"),
        ("RSn", "RS_n"),
        ("RS_(n-1)", "RS_<n-1>"),
        ("RS_n+k", "RS_<n+k>"),
        ("RS_< n - 1 >", "RS_<n-1>"),
        ("X_N", "X_n"),
    ],
)
def test_near_misses_say_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(RefError) as caught:
        parse_ref(text)
    assert f"did you mean {meant}?" in caught.value.hint


@given(families, st.integers(0, 10**6), st.integers(0, 10**3), st.integers(1, 64), st.data())
def test_op_id_and_its_text_are_inverses(family: str, first: int, more: int, pieces: int, data: st.DataObject) -> None:
    op = OpId(family, first, first + more, data.draw(st.integers(0, pieces - 1)), pieces)
    assert OpId.parse(str(op)) == op


@given(st.text(alphabet="AR_0123456789-[]/٣ ", max_size=14))
def test_op_id_parses_only_what_it_prints(text: str) -> None:
    try:
        op = OpId.parse(text)
    except ValueError:
        return
    assert str(op) == text
