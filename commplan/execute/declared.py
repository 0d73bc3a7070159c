"""The most communication bytes that one backward may take: the plan's buffers, and what accumulation and arrival change."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Final

from commplan.execute.backward import Backward
from commplan.execute.program import Program
from commplan.ops import Kind, piece_bounds
from commplan.plan.instants import bytes_by_step
from commplan.plan.model import COMMUNICATION, Backwards, Buffer, BufferKind

_KNOWN_FROM_BACKWARD: Final = (BufferKind.GRADIENT, BufferKind.PARTIAL)


def declared_bytes(program: Program, backward: Backward) -> int:
    """The bound for a backward that has come to its end, in bytes on this rank.

    It is what the plan's buffers take, except that

    - buffers of modules that were not reduced in their places are not there;
    - a reduced shard that is left as a partial sum is there until the end of root;
    - so is the partial sum that an earlier backward left; of a module that was reduced in its place, only until what reads
      it together with the gradients is over;
    - gradients that are held take what they took: those that were accumulated without sync come in the reduce dtype, while
      the plan counts them in the one that compute used;
    - gradients that were complete before their hook could open are there from then until they are packed;
    - gradients that are left to a later backward are there to the end, those that an earlier one left until they are packed.

    What has no place in the plan, `Backward.irregular_bytes`, counts from beginning to end.
    """
    in_place = backward.live.keys() - backward.late.keys()
    is_plain = not program.accumulates and not backward.previous_bytes and backward.held == program.held
    if is_plain and in_place == program.steps_of.keys() and all(backward.live[module].all_reduce for module in in_place):
        return program.peak_bytes + backward.irregular_bytes
    return max(bytes_by_step(program.plan.steps, list(_buffers(program, backward, in_place)))) + backward.irregular_bytes


def _buffers(program: Program, backward: Backward, in_place: set[int]) -> Iterator[Buffer]:
    """Those that there were in a backward, irregular ones apart."""
    last_read: dict[int, int] = {}
    for buffer in program.plan.buffers:
        if buffer.kind in _KNOWN_FROM_BACKWARD or buffer.kind not in COMMUNICATION:
            continue
        if buffer.backwards is (Backwards.EARLIER if backward.is_last else Backwards.LAST):
            continue
        if buffer.kind is BufferKind.WIRE:
            # In root late modules take part in what has its place there.
            here = backward.live.keys() if buffer.born >= program.first_step[program.root] else in_place
            yield replace(buffer, size_bytes=_copy_bytes(program, backward, buffer, here))
            continue
        members = [module for module in range(buffer.first, buffer.last + 1) if module in in_place]
        if not members:
            continue
        size_bytes = _share_bytes(program, buffer, members)
        is_kept = buffer.kind is BufferKind.SHARD and not all(backward.live[module].all_reduce for module in members)
        yield replace(buffer, size_bytes=size_bytes, freed=program.end if is_kept else buffer.freed)
        for module in members:
            if buffer.kind is BufferKind.RS_INPUT:
                last_read[module] = buffer.freed
            elif buffer.kind is BufferKind.SHARD:
                # Without a reduce-scatter both are added where the gradients are packed.
                last_read.setdefault(module, buffer.born)
    for module, size_bytes in backward.previous_bytes.items():
        yield Buffer(BufferKind.PARTIAL, module, module, size_bytes, 0, last_read.get(module, program.end))
    for module, (size_bytes, since) in backward.held.items():
        packed, _ = program.steps_of[module][0]
        yield Buffer(BufferKind.GRADIENT, module, module, size_bytes, since, packed)
    for module, (size_bytes, since) in backward.kept.items():
        yield Buffer(BufferKind.GRADIENT, module, module, size_bytes, since, program.end)


def _share_bytes(program: Program, buffer: Buffer, members: Sequence[int]) -> int:
    """The part of a buffer that `members` have in it."""
    modules = program.modules
    whole = sum(module.shard_numel for module in modules[buffer.first : buffer.last + 1])
    return buffer.size_bytes * sum(modules[module].shard_numel for module in members) // whole


def _copy_bytes(program: Program, backward: Backward, buffer: Buffer, here: Container[int]) -> int:
    """What is copied for the wire if only modules in `here` are there: nothing that lies side by side as it is."""
    step = program.copies[buffer.born]
    op = step.op
    reduces = step.kind is Kind.ALL_REDUCE
    members = [m for m in op.members if m in here and (backward.live[m].all_reduce or not reduces)]
    casts = step.dtype not in (None, program.modules[op.first].reduce_dtype)
    shards = {str(m) if m in backward.late else str(program.shard_of[m]) for m in members} if reduces else {str(op)}
    if not casts and len(shards) <= 1 and (op.pieces == 1 or len(members) <= 1):
        return 0
    if not reduces:
        return _share_bytes(program, buffer, members)
    bounds = (piece_bounds(program.modules[module].shard_numel, op.piece, op.pieces) for module in members)
    return sum(end - begin for begin, end in bounds) * program.itemsize_bytes(step)
