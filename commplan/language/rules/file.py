"""Rules about the file as YAML, and about its keys."""

from __future__ import annotations

from typing import Final

from commplan.errors import Rule, Severity
from commplan.language.rules.examples import RIGHT, example

FILE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        code="CP001",
        title="Not YAML",
        severity=Severity.ERROR,
        what="The file breaks the syntax of YAML: a bracket or quote that is not closed, a wrong indentation, a tab.",
        why="Nothing after the first such place can be read, so it is the only finding of its file.",
        wrong=example(rs="RS_n: {after: compute_n"),
        right=RIGHT,
    ),
    Rule(
        code="CP002",
        title="A character that may not stand in a schedule",
        severity=Severity.ERROR,
        what="The file is not UTF-8, or has control characters, or a text in it has some. A byte order mark of UTF-8 is fine.",
        why="Control characters are invisible, and editors and terminals disagree about where they end a line.",
        wrong=RIGHT.replace("example", "exam\x07ple"),
        right=RIGHT,
    ),
    Rule(
        code="CP003",
        title="An empty file",
        severity=Severity.ERROR,
        what="The file holds nothing, or only comments.",
        why="An empty schedule reduces no gradient; ranks would train apart.",
        wrong="# a schedule is still to be written\n",
        right=RIGHT,
    ),
    Rule(
        code="CP004",
        title="Too large or too deep",
        severity=Severity.ERROR,
        what="The file has more than 64 KiB, or lists and mappings nested more than 16 deep. A schedule needs six levels.",
        why="It is hardly a schedule, and checking must end quickly whatever the file holds.",
        wrong=example(rs="RS_n: {after: " + "[" * 16 + "compute_n" + "]" * 16 + "}"),
        right=RIGHT,
    ),
    Rule(
        code="CP005",
        title="A part of YAML that the language does not use",
        severity=Severity.ERROR,
        what="Anchors `&x`, aliases `*x`, merge keys `<<`, tags `!x`, and more than one document in a file.",
        why="A line would depend on another far away, and chains of aliases grow without bound. `n` is what repeats a line.",
        wrong=example(rs="RS_n: &when_done {after: compute_n}"),
        right=RIGHT,
    ),
    Rule(
        code="CP006",
        title="A key written twice",
        severity=Severity.ERROR,
        what="A mapping has the same key twice.",
        why="Most YAML readers keep the last one silently, so half of what was written would be lost.",
        wrong=example(ar="AR_n: {after: RS_n, after: compute_n}"),
        right=RIGHT,
    ),
    Rule(
        code="CP007",
        title="An unknown key",
        severity=Severity.ERROR,
        what="A key that means nothing in its place. Keys are written in lower case.",
        why="A misspelt attribute that is passed over leaves an op to start before what it should wait for.",
        wrong=example(ar="AR_n: {afer: RS_n}"),
        right=RIGHT,
    ),
    Rule(
        code="CP008",
        title="A missing key",
        severity=Severity.ERROR,
        what="A schedule has a `version` and a `name`; a param that is written as a mapping has a `default`.",
        why="Without a version a later reader could not tell what the file means; plans, traces and errors carry the name.",
        wrong=RIGHT.replace("version: 1\n", ""),
        right=RIGHT,
    ),
    Rule(
        code="CP009",
        title="A value of the wrong type",
        severity=Severity.ERROR,
        what="A number where a text belongs, a mapping where a list belongs, nothing where a value belongs.",
        why="Guessing what was meant would make two readers disagree about the same file.",
        wrong=example(rs="RS_n: compute_n"),
        right=RIGHT,
    ),
    Rule(
        code="CP010",
        title="An unknown version of the language",
        severity=Severity.ERROR,
        what="`version` is 1. It is the version of the language, not of the schedule.",
        why="A later version may give the same words another meaning.",
        wrong=RIGHT.replace("version: 1", "version: 2"),
        right=RIGHT,
    ),
    Rule(
        code="CP011",
        title="Not in version 1 of the language",
        severity=Severity.ERROR,
        what=(
            "Selectors (`for:`), a `pre_forward` section, and hierarchical all-reduce (reduce-scatter and all-gather over the "
            "replicate axis) have their place kept, but no meaning yet."
        ),
        why="The line reads as if it did something, and nothing would happen.",
        wrong=example(ar="AR_n: {after: RS_n, for: moe}"),
        right=RIGHT,
    ),
    Rule(
        code="CP012",
        title="A schedule without lines",
        severity=Severity.ERROR,
        what="At least one of `pre_backward`, `post_backward` and `root` has a line.",
        why="A schedule without lines reduces no gradient.",
        wrong="version: 1\nname: example\npost_backward: []\n",
        right=RIGHT,
    ),
    Rule(
        code="CP013",
        title="A word that is none of the choices",
        severity=Severity.ERROR,
        what="`kind`, `axis`, `dtype`, `when`, `priority` and `communicator` take one of a few words, in lower case.",
        why="A choice that is not understood would fall back to another one.",
        wrong=example(ar="AR_n: {after: RS_n, dtype: float32}"),
        right=example(ar="AR_n: {after: RS_n, dtype: fp32}"),
    ),
    Rule(
        code="CP014",
        title="Not a name",
        severity=Severity.ERROR,
        what=(
            "Params and lanes are named with letters, digits and underscores, a letter first. The name of a schedule is one "
            "line of at most 100 characters."
        ),
        why="A param stands inside an index, where `<n-my-k>` could not be told from a subtraction.",
        wrong=example(rs="RS_n: {after: compute_n, lane: my-lane}", before="lanes: {my-lane: {priority: high}}\n"),
        right=example(rs="RS_n: {after: compute_n, lane: my_lane}", before="lanes: {my_lane: {priority: high}}\n"),
    ),
)
