"""Slips in the memory that a plan declares. It follows from steps and modules, so whatever differs is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Data = dict[str, Any]
Mutants = Iterator[Data]
KINDS = ("gradient", "rs_input", "shard", "partial_sum", "wire", "parameter")
BACKWARDS = ("every", "earlier", "last")
EVERY = BACKWARDS[0]


def _with(data: Data, number: int, *instead: Data) -> Data:
    """The plan with other buffers in place of one."""
    found = data["buffers"]
    return {**data, "buffers": [*found[:number], *instead, *found[number + 1 :]]}


def _changed(data: Data, key: str, values: Callable[[Data], tuple[Any, ...]]) -> Mutants:
    """One buffer with another value of a key, for each value that is another."""
    for number, buffer in enumerate(data["buffers"]):
        for value in values(buffer):
            if value != buffer.get(key, EVERY):
                yield _with(data, number, {**buffer, key: value})


def drop(data: Data) -> Mutants:
    """Leave one out."""
    yield from (_with(data, number) for number in range(len(data["buffers"])))


def duplicate(data: Data) -> Mutants:
    """Have one twice, beside itself and at the end."""
    for number, buffer in enumerate(data["buffers"]):
        yield _with(data, number, buffer, buffer)
        yield {**data, "buffers": [*data["buffers"], buffer]}


def swap(data: Data) -> Mutants:
    """Have two neighbours in the other order."""
    found = data["buffers"]
    for number in range(len(found) - 1):
        yield {**data, "buffers": [*found[:number], found[number + 1], found[number], *found[number + 2 :]]}


def change_size(data: Data) -> Mutants:
    """A byte more or less, half, twice, nothing, less than nothing."""
    yield from _changed(data, "size_bytes", lambda b: tuple(_sizes(b["size_bytes"])))


def _sizes(size_bytes: int) -> Iterator[int]:
    yield from (size_bytes - 1, size_bytes + 1, size_bytes // 2, size_bytes * 2, 0, -size_bytes)


def change_birth(data: Data) -> Mutants:
    """Make one a step sooner or later, or at the very start."""
    yield from _changed(data, "born", lambda b: (b["born"] - 1, b["born"] + 1, 0))


def change_end(data: Data) -> Mutants:
    """Let one go a step sooner or later, at once, or at the end of root."""
    num_steps = sum(len(hook["steps"]) for hook in data["hooks"])
    yield from _changed(data, "freed", lambda b: (b["freed"] - 1, b["freed"] + 1, b["born"], num_steps))


def change_kind(data: Data) -> Mutants:
    """Say that it holds something else."""
    yield from _changed(data, "kind", lambda _: KINDS)


def change_members(data: Data) -> Mutants:
    """Let it be of a module more or less, at either end, or of the next ones."""
    for key in ("first", "last"):
        yield from _changed(data, key, lambda b, key=key: (b[key] - 1, b[key] + 1))  # type: ignore[misc]
    for number, buffer in enumerate(data["buffers"]):
        yield _with(data, number, {**buffer, "first": buffer["first"] + 1, "last": buffer["last"] + 1})


def change_backwards(data: Data) -> Mutants:
    """Let one live in other backwards, said or left unsaid; and make of one in every backward two, or of two one."""
    yield from _changed(data, "backwards", lambda _: BACKWARDS)
    for number, buffer in enumerate(data["buffers"]):
        plain = {key: value for key, value in buffer.items() if key != "backwards"}
        if plain != buffer:
            yield _with(data, number, plain)
            rest = [other for other in data["buffers"] if other is not buffer]
            yield {**data, "buffers": [other for other in rest if not _is_twin(other, buffer)]}
        else:
            yield _with(data, number, *({**plain, "backwards": name} for name in BACKWARDS[1:]))


def _is_twin(one: Data, other: Data) -> bool:
    """Whether two buffers are of the same modules and kind, in different backwards."""
    return all(one[key] == other[key] for key in ("kind", "first", "last", "born"))


def settle(data: Data) -> None:
    """Leave unsaid what goes without saying."""
    data["buffers"] = [
        {key: value for key, value in buffer.items() if (key, value) != ("backwards", EVERY)} for buffer in data["buffers"]
    ]


OPERATORS: Mapping[str, Callable[[Data], Mutants]] = {
    "drop": drop,
    "duplicate": duplicate,
    "swap two": swap,
    "change the size": change_size,
    "change the birth": change_birth,
    "change the end": change_end,
    "change the kind": change_kind,
    "change the modules": change_members,
    "change the backwards": change_backwards,
}
