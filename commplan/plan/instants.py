"""How much memory a step takes: the more of two instants.

While a step packs gradients they are all still there, and what it makes of them is not yet; from then on it is the other way
round.  A step that packs none has the second instant alone.  A gradient that is freed at a step is packed by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from commplan.ops import Kind
from commplan.plan.model import Buffer, BufferKind, OpStep, Step


def bytes_by_step(steps: Sequence[Step], buffers: Collection[Buffer]) -> list[int]:
    """Bytes that `buffers` hold at each of `steps`, and last at the end of root."""
    change = [0] * (len(steps) + 2)
    packed: Counter[int] = Counter()
    for buffer in buffers:
        change[buffer.born] += buffer.size_bytes
        change[buffer.freed + 1] -= buffer.size_bytes
        if buffer.kind is BufferKind.GRADIENT:
            packed[buffer.freed] += buffer.size_bytes
    made: Counter[int] = Counter()
    for buffer in buffers if packed else ():
        if buffer.born in packed and _is_made_of_packed(buffer, steps):
            made[buffer.born] += buffer.size_bytes
    by_step = list(accumulate(change))[:-1]
    for number, size_bytes in packed.items():
        by_step[number] -= min(size_bytes, made[number])
    return by_step


def alive(steps: Sequence[Step], buffers: Iterable[Buffer], number: int) -> list[Buffer]:
    """Those of `buffers` that are there at the instant of step `number` at which they hold the most."""
    here = [buffer for buffer in buffers if buffer.born <= number <= buffer.freed]
    packed = {buffer for buffer in here if buffer.kind is BufferKind.GRADIENT and buffer.freed == number}
    made = {buffer for buffer in here if buffer.born == number and _is_made_of_packed(buffer, steps)}
    missing = min(made, packed, key=lambda absent: sum(buffer.size_bytes for buffer in absent))
    return [buffer for buffer in here if buffer not in missing]


def _is_made_of_packed(buffer: Buffer, steps: Sequence[Step]) -> bool:
    """Whether a step that packs gradients allocates a buffer only when they are packed, into another one: shards and wire
    copies, but for the shard that an all-reduce packs into.
    """
    if buffer.kind is BufferKind.WIRE:
        return True
    if buffer.kind is not BufferKind.SHARD:
        return False
    step = steps[buffer.born]
    return isinstance(step, OpStep) and step.kind is Kind.REDUCE_SCATTER
