"""What findings say to write, written: hint by hint, by hand. The finding is gone, and no error comes in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan.errors import Severity
from tests import given

ERR = Path(__file__).parent / "cases" / "err"
INPUT, APPLY = "  - RS_n: {after: compute_n", "root:\n  - apply_n: {after: AR_n}\n"

FOLLOWED = [
    ("cycle", "take AR_n out of the `after` of RS_n", [("[compute_n, AR_n]", "compute_n")]),
    ("cycle_of_three", "take apply_n out of the `after` of RS_n", [("RS_n: {after: apply_n}", "RS_n")]),
    ("gather_waits_too_long", "write RS_<n-1>", [("[compute_n, RS_n]", "[compute_<n-1>, RS_<n-1>]")]),
    ("later_op", "name apply_<n-1> and AR_<n-1>", [("apply_n: {after: AR_n}", "apply_<n-1>: {after: AR_<n-1>}")]),
    ("later_bucket", "give AR_n the same `fuse`", [("{after: RS_n}", "{after: RS_n, fuse: {modules: 4}}")]),
    ("later_wait", "move this line to root", [("  - wait: AR_*\n", ""), ("root:", "root:\n  - wait: AR_*"), ("_<n+1>", "_n")]),
    ("unordered", "add RS_n to its `after`", [("RS_<n-1>}", "[RS_<n-1>, RS_n]}"), ("- apply_n", "- apply_n: {after: AR_n}")]),
    ("unordered_pieces", "add `after: RS_n` to it", [("{chunks: 4}", "{chunks: 4, after: RS_n}")]),
    ("unordered_gather", "write `- wait: AG_n`", [("AG_<n+1>", "AG_<n+1>\n  - wait: AG_n")]),
    (
        "gather_too_late",
        "place AG_<n+1> in pre_backward, with `- wait: AG_n` below it",
        [("  - AG_n\n", ""), ("post_backward:", "pre_backward:\n  - AG_<n+1>\n  - wait: AG_n\npost_backward:")],
    ),
    ("never_applied", "place `- apply_n: {after: AR_n}` in root", [("{after: RS_n}\n", "{after: RS_n}\n" + APPLY)]),
    ("applied_twice", "remove this line", [(APPLY, "")]),
    ("applied_twice", "or line 6", [("  - apply_<n-1>: {after: AR_<n-1>}\n", "")]),
    (
        "skipped_before",
        "move `when: last_backward` to AR_n",
        [(", when: last_backward", ""), ("after: RS_n", "after: RS_n, when: last_backward")],
    ),
    (
        "peak_over_cap",
        "`- apply_<n-18>: {after: AR_<n-18>}`",
        [(INPUT, "  - apply_<n-18>: {after: AR_<n-18>}\n" + INPUT), (APPLY, "")],
    ),
    ("unbounded_inputs", "write `- wait: RS_<n-1>`", [(INPUT, "  - wait: RS_<n-1>\n" + INPUT)]),
    (
        "unbounded_shards",
        "`- apply_<n-2>: {after: AR_<n-2>}`",
        [(INPUT, "  - apply_<n-2>: {after: AR_<n-2>}\n" + INPUT), (APPLY, "")],
    ),
    ("two_tables_in_one_op", "write `chunks: 2`", [("compute_n}", "compute_n, chunks: 2}")]),
    ("hides_nothing", "the end of post_backward", [("root:\n  - AR_n: {after: RS_n}\n", "  - AR_n: {after: RS_n}\nroot:\n")]),
    ("long_tail", "add `tail: 1`", [("64MiB", "64MiB, tail: 1")]),
    (
        "params_bounds",
        "write `max: 1024`",
        [
            ("5000", "1024"),
            ("min: 0", "min: 1"),
            ("default: 0", "default: 1"),
            ("9", "8"),
            ("min: 3, max: 1", "min: 1, max: 3"),
        ],
    ),
]


@pytest.mark.parametrize(("case", "hint", "changes"), FOLLOWED)
def test_a_hint_can_be_followed(case: str, hint: str, changes: list[tuple[str, str]]) -> None:
    text = (ERR / f"{case}.yaml").read_text(encoding="utf-8")
    before = given.findings(text)
    code = next(violation.code for violation in before if hint in violation.hint)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    after = given.findings(text)
    assert code not in {violation.code for violation in after}
    assert [str(violation) for violation in after if violation.severity is Severity.ERROR] == []


def test_what_bounds_memory_counts_buckets_and_delays() -> None:
    """`RS_<n-1>` of a bucket may be issued later than hook n; the hint names one that surely is not."""
    fused = "version: 1\nname: x\npost_backward:\n  - RS_n: {after: compute_n, fuse: {modules: 4, tail: 1}}\n"
    fused += "  - AR_n: {after: RS_n, fuse: {modules: 4, tail: 1}}\n" + APPLY
    (found,) = given.findings(fused)
    assert found.code == "CP402"
    assert "`- wait: RS_<n-4>` above RS_n" in found.hint
    assert given.findings(fused.replace(INPUT, "  - wait: RS_<n-4>\n" + INPUT)) == ()
    assert {v.code for v in given.findings(fused.replace(INPUT, "  - wait: RS_<n-1>\n" + INPUT))} >= {"CP102"}
