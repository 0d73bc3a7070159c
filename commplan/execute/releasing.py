"""Gives memory back: as the plan says, what is left when backward ends, and all of one that is dropped."""

from __future__ import annotations

from commplan.execute.backward import Backward
from commplan.execute.memory import Memory
from commplan.execute.program import Program
from commplan.execute.store import Store
from commplan.plan.model import Buffer, BufferKind


def free(backward: Backward, buffer: Buffer, program: Program, memory: Memory) -> None:
    """Compute is behind the last reader of `buffer`; a shard that was applied is `.grad` from now on."""
    live = backward.live
    for instance in [live[module] for module in range(buffer.first, buffer.last + 1) if module in live]:
        if buffer.kind is BufferKind.RS_INPUT:
            instance.release_inputs(memory)
        elif buffer.kind is BufferKind.SHARD:
            instance.write()
            instance.release_shard(memory)
        elif buffer.kind is BufferKind.WIRE:
            instance.release_copies(memory, program.copies[buffer.born].op)


def free_all(backward: Backward, memory: Memory) -> None:
    """Compute is behind everything: what the plan has not freed, partial sums apart."""
    for instance in backward.instances:
        instance.release_inputs(memory)
        instance.release_copies(memory)
        instance.write()
        instance.release_shard(memory)
    backward.gathers.drop()


def drop(backward: Backward | None, store: Store) -> None:
    """Forget a backward, if one is under way, and what waits for a later one. Nothing is in flight any more."""
    memory = store.memory
    buffers = [partial.buffer for partial in store.partial_sums.values()]
    instances = backward.instances if backward is not None else []
    for instance in instances:
        memory.drop(instance.held_bytes)
        buffers.extend(instance.inputs)
        buffers.extend(copy for copies in instance.copies.values() for copy in copies)
        # One that was left as a partial sum belongs to the store, or to whoever adds to it.
        if instance.shard is not None and instance.all_reduce:
            buffers.append(instance.shard)
    grads = {id(instance.shard) for instance in instances if instance.is_grad}
    for buffer in buffers:
        memory.release(buffer, kept=id(buffer) in grads)
    if backward is not None:
        backward.gathers.drop()
    store.forget()
