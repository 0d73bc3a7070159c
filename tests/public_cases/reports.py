"""Public bug reports of users of HSDP elsewhere, each with what stock FSDP2 makes of its case and what a schedule has to.

A test that holds the right value of a case names its reports: `@pytest.mark.report("pytorch#180889")`.  Cases that nobody
reported are named in words.  `marks` finds all of them in the sources.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One case: its reports, or its name where there are none; what stock FSDP2 does; what happens under a schedule."""

    reports: tuple[str, ...]
    case: str
    stock: str
    commplan: str


REPORTED: Final[Sequence[Row]] = (
    Row(
        ("pytorch#180889",),
        "all-reduces that lag behind must not read or write buffers that were given back",
        "right on CPU, where compute waits for each",
        "2.5 k with every collective as late as the plan allows and every freed buffer filled with NaN",
    ),
    Row(
        ("pytorch#158719", "pytorch#170667", "torchtitan#2747"),
        "ranks of one shard group use different parameters of a group",
        "gloo ends the process, NCCL waits; zero-filled means with `set_reduce_scatter_unused_params`",
        'with `rank_checks="always"` an error that names op, group and ranks; the same zero-filled means when asked for',
    ),
    Row(
        ("pytorch#75902", "pytorch#75373"),
        "replicas use different parameters of equal shape",
        "mixes their gradients without a word",
        "all ranks raise, and no gradient is left; zero-filled means when asked for",
    ),
    Row(
        ("composer#3866", "torchtitan#1329"),
        "an exception in backward, then `zero_grad` and a clean step",
        "later backwards do not come to their end; partial sums stay",
        "the clean value; nothing is pending",
    ),
    Row(
        ("Megatron-LM#7186",),
        "all-reduce only with the last microbatch",
        "7.5 k for three microbatches",
        "7.5 k and 10 k, with as many reduce-scatters as microbatches and one all-reduce for each module",
    ),
    Row(
        ("torchtitan#1929", "torchtitan#4505"),
        "a microbatch that raises while accumulation flags are set",
        "as after any exception",
        "the next step is as a first one, whatever had been accumulated",
    ),
    Row(("pytorch#129259",), "the model's input needs no gradient", "right", "equal; each group is reduced once"),
    Row(("pytorch#86051",), "one Linear, whose input needs no gradient", "right", "equals the unsharded copy"),
    Row(
        ("fairscale#780", "pytorch#139671"),
        "a block used twice in one forward",
        "right",
        "equal; each group is reduced once",
    ),
    Row(("pytorch#106637",), "two forwards, then two backwards", "right", "equals the unsharded copy"),
    Row(
        ("pytorch#144535",),
        "hooks of modules run, but the end of backward never does",
        "nothing is noticed",
        "the next step or forward raises and names the ops that are missing; a new forward after `zero_grad` goes on",
    ),
    Row(("pytorch#180665",), "CPU offload (`pin_memory=False`), collectives held back", "right", "2.5 k"),
    Row(("pytorch#162338",), "averages on gloo in fp32, bf16, fp16", "right", "2.5 k"),
    Row(
        ("pytorch#155903",),
        "a divide factor of 8, sums forced, on one and two axes",
        "1.25 k; on gloo the factor alone raises",
        "1.25 k on both",
    ),
    Row(("pytorch#144045", "verl#7493"), "an axis of one rank", "right", "2.5 k"),
    Row(("pytorch#106034",), "local gradients of 20000 in fp16, whose sum overflows", "20000", "20000"),
    Row(
        ("pytorch#196996",),
        "bf16 parameters reduced in fp32, of which one comes with a later microbatch",
        "raises",
        "exactly the unsharded values",
    ),
    Row(("VeOmni#862",), "the global norm does not count replicas twice", "0.530134", "0.530134"),
    Row(("AReaL#313",), "a head that is not sharded at all", "trains it apart on each rank", "refused at `attach`, naming it"),
    Row(
        ("pytorch#176225",),
        "tied embedding and head, in one group and in two",
        "one group: right; two: raises at the first forward",
        "one group: equals the unsharded copy; two: refused at `attach`",
    ),
    Row(
        ("pytorch#83129", "pytorch#148756"),
        "a block that is used on no rank",
        "right",
        "its `.grad` is None; the others are reduced once",
    ),
    Row(("pytorch#91167",), "a block that is frozen in odd steps", "right", "None, then exact"),
    Row(
        ("pytorch#129450",),
        "hooks after accumulation, with two microbatches",
        "each runs once, with the reduced gradient",
        "the same",
    ),
    Row(("pytorch#172543",), "`create_graph=True`", "gradients without a graph, without a word", "raises: not supported"),
    Row(
        ("OLMo-core#829",),
        "a collective that never ends",
        "an error of the backend after its timeout",
        "an error that names op, module and group, at the timeout",
    ),
    Row(("torchtitan#3821",), "one all-reduce for each parameter", "one for each group", "one for each group"),
    Row(
        ("hyper-parallel#305",),
        "an all-reduce that takes the module pushed last for its own",
        "right",
        "each module is all-reduced once, in its own slot of the plan",
    ),
    Row(
        ("one block in two reentrant checkpoints",),
        "one block in two reentrant checkpoints",
        "wrong (off by 0.17)",
        "equals the unsharded copy",
    ),
    Row(
        ("DeepSpeed#7804",),
        "a cure for corruption that took away the overlap",
        "no overlap on CPU",
        "right, with an all-reduce in flight when a later module computes, under every schedule but `blocking`",
    ),
    Row(
        ("verl-omni#421",),
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "no word",
        "one warning on CUDA, none on CPU",
    ),
)
"""Reported by somebody."""

KINDS: Final[Sequence[Row]] = (
    Row(
        ("parameters or modules in some microbatches only",),
        "parameters or modules that take part in some microbatches only",
        "raises or loses partial sums in most combinations",
        "equals the unsharded copy",
    ),
    Row(("retained graph",), "a retained graph", "right", "equal"),
    Row(("a head called for each chunk",), "a head called once for each chunk of the loss", "right", "equal"),
    Row(
        ("checkpointing around and inside units",),
        "activation checkpointing of both kinds around and inside sharded units",
        "right",
        "equal",
    ),
    Row(
        ("several meshes and clipping",),
        "modules on one and on two axes in one model, and clipping over them",
        "right; clips one mesh at a time",
        "equal; the parts make up the unsharded norm",
    ),
    Row(("shards of length zero",), "shards of length zero", "right", "equal"),
    Row(("swapped axes",), "swapped ranks, and swapped names of axes", "right", "equal"),
    Row(
        ("partial sums in a low precision",),
        "partial sums are kept in the reduce dtype",
        "right",
        "exact in fp32 under bf16 parameters; equal where the reduce dtype is low",
    ),
    Row(
        ("another order of backward than the plan's",),
        "modules complete in another order than the plan's, or another one each step",
        "right",
        "equal",
    ),
    Row(
        ("collectives of the user between microbatches",),
        "collectives of the user's between microbatches and in hooks, on the mesh's groups",
        "right",
        "right, both",
    ),
    Row(
        ("unequal numbers of microbatches",),
        "replicas run unequal numbers of microbatches",
        "averages them without a word",
        "all ranks raise, and no gradient is left",
    ),
)
"""Further kinds."""


def marks() -> Mapping[str, tuple[str, ...]]:
    """Report -> the test files that name it, as paths below `tests`."""
    found: dict[str, dict[str, None]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in _marked(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, {})[path.relative_to(TESTS).as_posix()] = None
    return {name: tuple(files) for name, files in found.items()}


def _marked(tree: ast.AST) -> Iterator[str]:
    """The arguments of each `pytest.mark.report(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.report":
            yield from (ast.literal_eval(argument) for argument in node.args)


def table() -> str:
    """The section "Public cases" of docs/cases.md."""
    where = marks()
    lines = [HEAD, "| case | reports | stock FSDP2 | commplan | tests |", "|---|---|---|---|---|"]
    for title, rows in (("Reported", REPORTED), ("Further kinds", KINDS)):
        lines.append(f"| **{title}** | | | | |")
        for row in rows:
            reports = ", ".join(name for name in row.reports if "#" in name) or "-"
            files = dict.fromkeys(file for name in row.reports for file in where.get(name, ()))
            tests = ", ".join(f"`{file.removesuffix('.py').replace('/test_', '/')}`" for file in files)
            lines.append(f"| {row.case} | {reports} | {row.stock} | {row.commplan} | {tests} |")
    return "\n".join(lines) + "\n"


HEAD: Final = """\
## Public cases

Faults that users of HSDP reported elsewhere, each with the value that is right. Most run on FK(K): block k returns its input
plus k times the sum of its parameter, the loss of rank r is r + 1 times the output, so every gradient entry of block k is
2.5 k on four ranks. 1.5 k and 3.5 k would say that no all-reduce ran, 5 k that one axis was not averaged. *Equal* is as under
Models; where stock FSDP2 is wrong, an unsharded copy decides. Every schedule of the library is meant. Tests are named by file
below `tests/` (`fsdp2/values` is `tests/fsdp2/test_values.py`), and find a report by `@pytest.mark.report`. This section is
written by `python -m tests.public_cases.reports`.
"""

PAGE: Final = TESTS.parent / "docs" / "cases.md"


def page() -> str:
    """docs/cases.md with the section as it should be: at its place, or at the end."""
    text = PAGE.read_text(encoding="utf-8")
    title = HEAD.splitlines()[0] + "\n"
    before, found, rest = text.partition(title)
    _, after_title, after = rest.partition("\n## ")
    section = f"{before.rstrip()}\n\n{table()}"
    return f"{section}\n## {after}" if found and after_title else section


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
