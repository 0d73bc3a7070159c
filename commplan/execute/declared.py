"""The most communication bytes that one backward may take: the plan's buffers, and what accumulation and arrival change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from commplan.execute.backward import Backward
from commplan.execute.program import Program
from commplan.plan.instants import bytes_by_step
from commplan.plan.model import COMMUNICATION, Buffer, BufferKind


def declared_bytes(program: Program, backward: Backward) -> int:
    """The bound for a backward that has come to its end, in bytes on this rank.

    It is what the plan's buffers take, except that

    - buffers of modules that were not reduced in their places are not there;
    - a reduced shard that is left as a partial sum is there until the end of root;
    - so is the partial sum that an earlier backward left; of a module that was reduced in its place, only until what reads
      it together with the gradients is over;
    - gradients that are held take what they took: those that were accumulated without sync come in the reduce dtype, while
      the plan counts them in the one that compute used;
    - gradients that were complete before their hook could open are there from then until they are packed.

    What has no place in the plan, `Backward.irregular_bytes`, counts from beginning to end.
    """
    in_place = backward.live.keys() - backward.late.keys()
    is_plain = not backward.previous_bytes and backward.held == program.held and in_place == program.steps_of.keys()
    if is_plain and all(backward.live[module].all_reduce for module in in_place):
        return program.peak_bytes + backward.irregular_bytes
    return max(bytes_by_step(program.plan.steps, list(_buffers(program, backward, in_place)))) + backward.irregular_bytes


def _buffers(program: Program, backward: Backward, in_place: set[int]) -> Iterator[Buffer]:
    """Those that there were in a backward, irregular ones apart."""
    last_read: dict[int, int] = {}
    for buffer in program.plan.buffers:
        members = in_place.intersection(range(buffer.first, buffer.last + 1))
        if not members or buffer.kind is BufferKind.GRADIENT or buffer.kind not in COMMUNICATION:
            continue
        is_kept = buffer.kind is BufferKind.SHARD and not all(backward.live[module].all_reduce for module in members)
        yield replace(buffer, freed=program.end) if is_kept else buffer
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
