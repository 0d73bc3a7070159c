"""From what every rank saw to one row a run, the summary file, and what is wrong with it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from demo_run.settings import Settings

Row = dict[str, Any]


def merge(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """One row a run from the records of all ranks: `by_rank[rank][run]`, as `lockstep.Run.record` makes them.

    Times are seconds, medians over steps and then over ranks; bytes are the largest of any rank; losses are averaged over
    ranks; digests cover the ranks in order.
    """
    return [_merge_run(records) for records in zip(*by_rank, strict=True)]


def _merge_run(records: Sequence[Row]) -> Row:
    differences = [record["max_grad_diff"] for record in records]
    losses = [mean(step) for step in zip(*(record["losses"] for record in records), strict=True)]
    lanes = dict.fromkeys(lane for record in records for lane in record["lanes"])
    declared = records[0]["declared_peak_bytes"]
    return {
        "schedule": records[0]["schedule"],
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "max_grad_diff": max(differences) if all(map(math.isfinite, differences)) else None,
        "grad_sha256": _digest(record["gradients"] for record in records),
        "param_sha256": _digest(record["parameters"] for record in records),
        "backward_median_s": median(record["backward_s"] for record in records),
        "hidden_s": median(record["hidden_s"] for record in records),
        "exposed_s": median(record["exposed_s"] for record in records),
        "lanes": {
            lane: {
                key: median(record["lanes"][lane][side] for record in records if lane in record["lanes"])
                for side, key in enumerate(("hidden_s", "exposed_s"))
            }
            for lane in lanes
        },
        "peak_bytes": max(record["peak_bytes"] for record in records),
        "declared_peak_bytes": None if declared is None else max(record["declared_peak_bytes"] for record in records),
    }


def _digest(parts: Any) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def problems(rows: Sequence[Row]) -> list[str]:
    """One line for each promise that the rows break; the first row is stock FSDP2, the reference."""
    found: list[str] = []
    stock = rows[0]
    for row in rows[1:]:
        name = row["schedule"]
        if row["max_grad_diff"] != 0.0:
            by = "a missing or non-finite one" if row["max_grad_diff"] is None else f"{row['max_grad_diff']:.3g}"
            found.append(f"{name}: gradients differ from stock FSDP2 by {by}")
        for key, what in (("grad_sha256", "gradients"), ("param_sha256", "parameters at the end")):
            if row["max_grad_diff"] == 0.0 and row[key] != stock[key]:
                found.append(f"{name}: {what} are not bit-equal to stock FSDP2")
        declared = row["declared_peak_bytes"]
        if declared is not None and row["peak_bytes"] > declared:
            found.append(f"{name}: held {row['peak_bytes']:,} bytes of communication buffers, its plan declares {declared:,}")
    return found


def write_summary(path: Path, settings: Settings, rows: Sequence[Row], emulated: Sequence[Row], sleep_s: float) -> None:
    """Write both parts as JSON; `runs` is the training part, stock FSDP2 first."""
    summary = {
        "mesh": {"replicate": settings.num_replicas, "shard": settings.num_shards},
        "steps": settings.steps,
        "runs": list(rows),
        "emulated": {"sleep_s": sleep_s, "blocks": settings.emulated_blocks, "runs": list(emulated)} if emulated else None,
    }
    path.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
