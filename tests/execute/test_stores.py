"""Whoever waits for a key is woken when another process decides on it, whatever the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from commplan.execute.stores import set_once

LONG_S = 60.0


def tcp_stores(use_libuv: bool) -> tuple[dist.Store, dist.Store]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    return server, dist.TCPStore("127.0.0.1", server.port, use_libuv=use_libuv)


def hash_stores() -> tuple[dist.Store, dist.Store]:
    store = dist.HashStore()
    return store, store


@pytest.mark.parametrize(
    "make", [hash_stores, lambda: tcp_stores(True), lambda: tcp_stores(False)], ids=["hash", "libuv", "no libuv"]
)
def test_the_first_decides_and_wakes_the_others(make: Callable[[], tuple[dist.Store, dist.Store]]) -> None:
    one, other = make()
    found: list[bytes] = []

    def wait() -> None:
        other.wait(["key"], timedelta(seconds=LONG_S))
        found.append(other.get("key"))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    # It is waiting by then, most likely; if not, the test shows less, and passes.
    thread.join(0.5)
    assert set_once(one, "key", "first") == "first"
    assert set_once(one, "key", "second") == "first"
    thread.join(LONG_S / 2)
    assert found == [b"first"]
