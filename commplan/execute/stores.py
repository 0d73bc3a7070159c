"""What torch's stores do differently, hidden."""

from __future__ import annotations

from torch.distributed.distributed_c10d import Store


def set_once(store: Store, key: str, value: str) -> str:
    """Set `key` unless another process did, and wake those who wait for it; the value that it has."""
    there = store.compare_set(key, "", value).decode()
    if there == value:
        # A TCPStore without libuv wakes nobody when compare_set makes a key.
        store.set(key, value)
    return there
