"""Ranks in words."""

from __future__ import annotations

from collections.abc import Sequence


def listed(ranks: Sequence[int], limit: int = 8) -> str:
    """The first `limit` ranks, and how many more there are."""
    shown = ", ".join(map(str, ranks[:limit]))
    return shown if len(ranks) <= limit else f"{shown} and {len(ranks) - limit} more"
