"""Rules about params, numbers and lanes."""

from __future__ import annotations

from typing import Final

from commplan.errors import Rule, Severity
from commplan.language.rules.examples import APPLY, HEAD, RIGHT, RS, WAIT, example

_DELAYED: Final = f"post_backward:\n{WAIT}{RS}  - AR_<n-k>: {{after: RS_<n-k>}}\nroot:\n{APPLY}"

DECLARATION_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        code="CP020",
        title="A param that is not declared",
        severity=Severity.ERROR,
        what="A word in an index or in the place of a number is the name of a param, and `params` declares each of them.",
        why="The number it stands for is unknown.",
        wrong=HEAD + _DELAYED,
        right=f"{HEAD}params: {{k: 2}}\n{_DELAYED}",
    ),
    Rule(
        code="CP021",
        title="Bounds that a param cannot keep",
        severity=Severity.ERROR,
        what=(
            "`default` lies within `min` and `max`, `min` is not above `max`, and both are numbers that each use of the param "
            "allows. A bound that is not written is the one that its uses need: a param used for `chunks` is at least 1."
        ),
        why="A run may set the param to any number within its bounds, so the schedule has to be right for all of them.",
        wrong=f"{HEAD}params: {{k: {{default: 9, min: 1, max: 8}}}}\n{_DELAYED}",
        right=f"{HEAD}params: {{k: {{default: 8, min: 1, max: 8}}}}\n{_DELAYED}",
    ),
    Rule(
        code="CP022",
        title="A param with a name that is taken",
        severity=Severity.ERROR,
        what="`n` is the module of the hook; words of the language and names of lanes are no names of params either.",
        why="`<n-n>` or `chunks: tail` would read as something else, and `modules` could not be passed to `compile` by name.",
        wrong=f"{HEAD}params: {{tail: 2}}\n{_DELAYED.replace('-k>', '-tail>')}",
        right=f"{HEAD}params: {{k: 2}}\n{_DELAYED}",
    ),
    Rule(
        code="CP023",
        title="A param that no line uses",
        severity=Severity.WARNING,
        what="`params` declares a number that stands nowhere.",
        why="Someone will set it and wonder why nothing changes.",
        wrong=example(before="params: {k: 2}\n"),
        right=RIGHT,
    ),
    Rule(
        code="CP024",
        title="A number out of range",
        severity=Severity.ERROR,
        what=(
            "`chunks` is 1 to 1024; `modules` and `bytes` of `fuse` are at least 1; offsets are at most 1024; no number is "
            "negative."
        ),
        why="An op in no pieces, or a bucket that holds nothing, cannot be run.",
        wrong=example(ar="AR_n: {after: RS_n, chunks: 0}"),
        right=example(ar="AR_n: {after: RS_n, chunks: 2}"),
    ),
    Rule(
        code="CP025",
        title="A built-in lane declared again",
        severity=Severity.ERROR,
        what="`compute`, `shard` and `replicate` exist without being written, and are as they are.",
        why="Every schedule can rely on what these lanes are. For other properties declare a lane of another name.",
        wrong=example(before="lanes: {replicate: {priority: high}}\n"),
        right=example(ar="AR_n: {after: RS_n, lane: outer}", before="lanes: {outer: {priority: high}}\n"),
    ),
    Rule(
        code="CP026",
        title="A lane that is not declared",
        severity=Severity.ERROR,
        what="`lane` names a built-in lane, or one of `lanes`.",
        why="A misspelt lane would be a queue of its own, and the order of the two ops that should share it would be lost.",
        wrong=example(ar="AR_n: {after: RS_n, lane: replicat}"),
        right=example(ar="AR_n: {after: RS_n, lane: replicate}"),
    ),
    Rule(
        code="CP027",
        title="A lane that no line uses",
        severity=Severity.WARNING,
        what="`lanes` declares a lane that no op runs on.",
        why="Usually an op was meant to have it as its `lane`.",
        wrong=example(before="lanes: {outer: {priority: high}}\n"),
        right=example(ar="AR_n: {after: RS_n, lane: outer}", before="lanes: {outer: {priority: high}}\n"),
    ),
)
