"""Rules about ops, waits and their attributes."""

from __future__ import annotations

from typing import Final

from commplan.errors import Rule, Severity
from commplan.language.rules.examples import APPLY, AR, HEAD, RIGHT, RS, WAIT, example

_PIPELINED: Final = f"{HEAD}post_backward:\n{WAIT}{RS}  - AR_<n-1>: {{after: RS_<n-1>}}\nroot:\n"
_FUSED: Final = f"{HEAD}post_backward:\n{WAIT}{RS}  - AR_n: {{after: RS_n, fuse: FUSE}}\nroot:\n{APPLY}"

LINE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        code="CP015",
        title="A line that does not hold one op",
        severity=Severity.ERROR,
        what="A line is one op, with its attributes under it, or one `wait`. Each begins with `- `.",
        why="In YAML the keys of one mapping have no order, and a schedule is about order.",
        wrong=example(ar="  - AR_n:\n    after: RS_n\n"),
        right=example(ar="  - AR_n:\n      after: RS_n\n"),
    ),
    Rule(
        code="CP016",
        title="Not the name of an op",
        severity=Severity.ERROR,
        what=(
            "An op is a family and an index: `RS_n`, `RS_<n-1>`, `RS_<n+1>`, `RS_<n-k>` with k from `params`, and `RS_*` in "
            "`after` and `wait`. No blanks, no numbers of modules."
        ),
        why="A schedule is written once for every number of modules; only plans, traces and errors name `AR_6`.",
        wrong=example(ar="AR_n-1: {after: RS_n-1}"),
        right=RIGHT,
    ),
    Rule(
        code="CP017",
        title="Every module in one line",
        severity=Severity.ERROR,
        what="`_*` stands for the ops of every module, to wait for them. It places none.",
        why="An op per module needs a hook per module: that is what `_n` says, in root too.",
        wrong=f"{_PIPELINED}  - apply_*: {{after: AR_*}}\n",
        right=f"{_PIPELINED}  - apply_n: {{after: AR_*}}\n",
    ),
    Rule(
        code="CP018",
        title="An offset in root",
        severity=Severity.ERROR,
        what="A line in `root` with `_n` stands for every module in order. `_<n-1>` has no module to count from.",
        why="Root opens once, after the last module.",
        wrong=f"{_PIPELINED}  - apply_<n-1>: {{after: AR_<n-1>}}\n",
        right=f"{_PIPELINED}{APPLY}",
    ),
    Rule(
        code="CP019",
        title="Compute cannot be placed",
        severity=Severity.ERROR,
        what="`compute_n` may stand in `after` and `wait`. It is autograd that runs it.",
        why="A schedule says when communication runs, never what is computed.",
        wrong=example(rs=f"  - compute_n\n{RS}"),
        right=RIGHT,
    ),
    Rule(
        code="CP028",
        title="A collective on the compute lane",
        severity=Severity.ERROR,
        what="Only `apply` runs on `compute`. To make compute wait for a collective, write `- wait: AR_<n-1>`.",
        why="Compute would stand still for the whole collective, and nothing would be hidden behind it.",
        wrong=example(ar="AR_n: {after: RS_n, lane: compute}"),
        right=example(ar=f"{AR}  - wait: AR_<n-1>\n"),
    ),
    Rule(
        code="CP029",
        title="An op of a free name without a kind",
        severity=Severity.ERROR,
        what="`AG`, `RS`, `AR` and `apply` are built in. An op of any other name says with `kind` what it does.",
        why="Mostly it is a built-in op misspelt, which would leave gradients that are not reduced.",
        wrong=example(ar="AllReduce_n: {after: RS_n}", apply="apply_n: {after: AllReduce_n}"),
        right=example(ar="AllReduce_n: {kind: all_reduce, after: RS_n}", apply="apply_n: {after: AllReduce_n}"),
    ),
    Rule(
        code="CP030",
        title="A kind or an axis for a built-in op",
        severity=Severity.ERROR,
        what="What `AG`, `RS`, `AR` and `apply` do is fixed; `kind` and `axis` are for ops of other names.",
        why="An `AR` that is no all-reduce would mislead everyone who reads the schedule.",
        wrong=example(ar="AR_n: {after: RS_n, kind: all_reduce}"),
        right=RIGHT,
    ),
    Rule(
        code="CP031",
        title="One name with two meanings",
        severity=Severity.ERROR,
        what="Ops of one name have one kind and one axis throughout the file.",
        why="`after: Outer_n` could not tell which of the two is meant.",
        wrong=example(
            ar="Outer_n: {kind: all_reduce, after: RS_n}",
            apply="Outer_n: {kind: apply, after: Outer_n}",
        ),
        right=example(
            ar="Outer_n: {kind: all_reduce, after: RS_n}",
            apply="Add_n: {kind: apply, after: Outer_n}",
        ),
    ),
    Rule(
        code="CP032",
        title="An attribute that means nothing for this kind of op",
        severity=Severity.ERROR,
        what=(
            "`after` and `lane` are for every op; `fuse` and `chunks` for collectives; `dtype` and `when` for reductions; "
            "`axis` for collectives of a free name."
        ),
        why="The line reads as if it did something. An apply is skipped by itself when its last reduction is.",
        wrong=example(apply="apply_n: {after: AR_n, chunks: 2}"),
        right=example(ar="AR_n: {after: RS_n, chunks: 2}"),
    ),
    Rule(
        code="CP033",
        title="A bucket with no limit, or two",
        severity=Severity.ERROR,
        what="`fuse` has either `modules` or `bytes`, and optionally `tail`.",
        why="Two limits would make it hard to see which closed a bucket; with none the first bucket would never close.",
        wrong=_FUSED.replace("FUSE", "{tail: 1}"),
        right=_FUSED.replace("FUSE", "{modules: 4, tail: 1}"),
    ),
    Rule(
        code="CP034",
        title="Not a size in bytes",
        severity=Severity.ERROR,
        what="A size is a whole number with KiB, MiB, GiB (powers of 1024), KB, MB or GB (of 1000) right behind it, or none.",
        why="`64M` may mean one or the other.",
        wrong=_FUSED.replace("FUSE", "{bytes: 64M, tail: 1}"),
        right=_FUSED.replace("FUSE", "{bytes: 64MiB, tail: 1}"),
    ),
)
