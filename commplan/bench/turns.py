"""Whose turn it is: blocks of steps, in rounds, so that what changes with time changes for all alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """One block: `num_steps` counted steps of row number `row`, in round number `round` of `num_rounds`, from 0."""

    row: int
    num_steps: int
    round: int
    num_rounds: int


def turns(num_rows: int, num_steps: int, block: int) -> Iterator[Turn]:
    """The blocks of a measurement in their order: `num_steps` for each row, at most `block` at a time.

    Each round has every row once and begins with another one, so that none always follows the same.
    """
    num_rounds = -(-num_steps // block)
    for number in range(num_rounds):
        size = min(block, num_steps - number * block)
        for place in range(num_rows):
            yield Turn((number + place) % num_rows, size, number, num_rounds)
