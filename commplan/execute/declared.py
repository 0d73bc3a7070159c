"""The most communication bytes that one backward may take: the plan's buffers, and what accumulation and arrival change."""

from __future__ import annotations

from itertools import accumulate

from commplan.execute.backward import Backward
from commplan.execute.program import Program
from commplan.plan.model import COMMUNICATION, BufferKind


def declared_bytes(program: Program, backward: Backward) -> int:
    """The bound for a backward that has come to its end, in bytes on this rank.

    To the plan's buffers are added:

    - the partial sum that an earlier backward left: until what reads it together with the gradients is over, for a module
      that was not reduced in its place until the end of root;
    - a reduced shard that is left as a partial sum, until the end of root;
    - gradients that were complete before their hook could open, until they are packed.

    What has no place in the plan, `Backward.irregular_bytes`, counts from beginning to end.
    """
    kept = {module for module, instance in backward.live.items() if not instance.all_reduce}
    if not backward.previous_bytes and not backward.waiting and not kept:
        return program.peak_bytes + backward.irregular_bytes
    end = program.end
    change = [0] * (end + 2)

    def add(size_bytes: int, born: int, freed: int) -> None:
        change[born] += size_bytes
        change[freed + 1] -= size_bytes

    last_read: dict[int, int] = {}
    for buffer in program.plan.buffers:
        if buffer.kind not in COMMUNICATION:
            continue
        members = range(buffer.first, buffer.last + 1)
        is_kept = buffer.kind is BufferKind.SHARD and any(module in kept for module in members)
        add(buffer.size_bytes, buffer.born, end if is_kept else buffer.freed)
        for module in members:
            if buffer.kind is BufferKind.RS_INPUT:
                last_read[module] = buffer.freed
            elif buffer.kind is BufferKind.SHARD:
                # Without a reduce-scatter both are added where the gradients are packed.
                last_read.setdefault(module, buffer.born)
    for module, size_bytes in backward.previous_bytes.items():
        is_in_place = module in backward.live and module not in backward.late
        add(size_bytes, 0, last_read.get(module, end) if is_in_place else end)
    for module, (size_bytes, since) in backward.waiting.items():
        steps = program.steps_of.get(module)
        add(size_bytes, since, steps[0][0] if steps else end)
    return max(accumulate(change)) + backward.irregular_bytes
