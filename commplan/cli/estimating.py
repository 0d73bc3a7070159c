"""`commplan estimate`: a profile by formulas, for what can't be measured yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from commplan.cli.files import require_places, told_if_replaced, write_whole
from commplan.errors import CommplanError
from commplan.estimate import MODELS, NODES, Job, estimate, find_model, find_node, preset_names
from commplan.estimate.formulas import Work
from commplan.language.source import did_you_mean, shown
from commplan.ops import ITEMSIZE_BYTES

Found = TypeVar("Found")

MOST: Final = 2**31
"""Of anything that is counted."""

_OF_NODE: Final = "In place of the node's"


def estimate_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{', '.join(preset_names(MODELS))}, or a YAML file as theirs.")
    ],
    node: Annotated[str, typer.Option(metavar="NODE", help=f"{', '.join(preset_names(NODES))}, or a YAML file as theirs.")],
    shard: Annotated[int, typer.Option(metavar="N", min=1, max=MOST, help="Devices that share one copy of the parameters.")],
    replicate: Annotated[int, typer.Option(metavar="N", min=1, max=MOST, help="Copies.")] = 1,
    sequence: Annotated[int, typer.Option(metavar="N", min=1, max=MOST, help="Tokens of a row.")] = 8192,
    micro_batch: Annotated[int, typer.Option(metavar="N", min=1, max=MOST, help="Rows of one backward of a device.")] = 1,
    recompute: Annotated[bool, typer.Option("--recompute", help="Layers run their forward again in backward.")] = False,
    keep_gathered: Annotated[
        bool, typer.Option("--keep-gathered", help="Parameters stay whole from forward to backward.")
    ] = False,
    gather_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of parameters in compute.")] = "bfloat16",
    reduce_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Of gradients on their way.")] = "float32",
    mfu: Annotated[
        float | None, typer.Option(min=0.001, max=1.0, help=f"Part of the peak that is reached. {_OF_NODE}.")
    ] = None,
    peak_flops: Annotated[float | None, typer.Option(metavar="F", min=1.0, help=f"FLOP/s of a device. {_OF_NODE}.")] = None,
    intra_bytes_per_s: Annotated[
        float | None, typer.Option(metavar="B", min=1.0, help=f"What a device sends inside a node, each way. {_OF_NODE}.")
    ] = None,
    inter_bytes_per_s: Annotated[
        float | None, typer.Option(metavar="B", min=1.0, help=f"What a device sends out of a node, each way. {_OF_NODE}.")
    ] = None,
    base_latency_s: Annotated[
        float | None, typer.Option(metavar="S", min=0.0, max=10.0, help=f"Of a collective. {_OF_NODE}.")
    ] = None,
    intra_latency_s: Annotated[
        float | None, typer.Option(metavar="S", min=0.0, max=10.0, help=f"Of a step inside a node. {_OF_NODE}.")
    ] = None,
    inter_latency_s: Annotated[
        float | None, typer.Option(metavar="S", min=0.0, max=10.0, help=f"Of a step between nodes. {_OF_NODE}.")
    ] = None,
    hbm_bytes_per_s: Annotated[float | None, typer.Option(metavar="B", min=1.0, help=f"Of memory. {_OF_NODE}.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile there. Default: standard output.")
    ] = None,
    table: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the module table there, for --modules.")] = None,
) -> None:
    """Make a profile by formulas: of a model on nodes of accelerators, for planning before anything can be measured.

    The profile says which formula and which source each figure is from. What no source was found for has to be given.
    docs/profile.md says what is estimated and how.

    Exit codes: 0 written; 2 wrong usage, or a file that can't be read or written.
    """
    require_places({"--output": output, "--table": table})
    for option, dtype in (("--gather-dtype", gather_dtype), ("--reduce-dtype", reduce_dtype)):
        if dtype not in ITEMSIZE_BYTES:
            raise typer.BadParameter(f"{shown(dtype)}: {did_you_mean(dtype, ITEMSIZE_BYTES)}", param_hint=option)
    figures = {
        "mfu": mfu,
        "peak_flops": peak_flops,
        "intra_bytes_per_s": intra_bytes_per_s,
        "inter_bytes_per_s": inter_bytes_per_s,
        "base_latency_s": base_latency_s,
        "intra_latency_s": intra_latency_s,
        "inter_latency_s": inter_latency_s,
        "hbm_bytes_per_s": hbm_bytes_per_s,
    }
    job = Job(
        model=_read("MODEL", find_model, model),
        node=_read("--node", find_node, node),
        shard=shard,
        replicate=replicate,
        work=Work(sequence, micro_batch, recompute),
        given={name: value for name, value in figures.items() if value is not None},
        gather_dtype=gather_dtype,
        reduce_dtype=reduce_dtype,
        reshards=not keep_gathered,
    )
    try:
        found = estimate(job)
    except CommplanError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        if table is not None:
            told_if_replaced(table)
            write_whole(table, found.table.model_dump_json(indent=2) + "\n")
        if output is None:
            typer.echo(found.text, nl=False)
        else:
            told_if_replaced(output)
            write_whole(output, found.text)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}") from error


def _read(hint: str, find: Callable[[str], Found], name: str) -> Found:
    try:
        return find(name)
    except CommplanError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error
