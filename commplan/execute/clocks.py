"""The clocks of many processes: how far apart `time.perf_counter` is, and how wrong that may be.

Processes of one host read one clock.  Of each host one rank, its leader, asks another host's leader for the time, several
times, and believes the quickest answer: the other clock was read somewhere between question and answer, so half of the round
trip is the error.  Leaders form a tree, which many ranks go through in a few steps; errors along the way add up.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from commplan.execute.board import Board

ROUNDS = 8

# Hosts that ask the same one, one after another.
FAN_OUT = 16


@dataclass(frozen=True, slots=True)
class Offset:
    """The reference's clock reads `offset_s` more than this one, wrong by at most `error_s`."""

    offset_s: float = 0.0
    error_s: float = 0.0

    def beyond(self, nearer: Offset) -> Offset:
        """This offset, of a clock whose own offset to the reference is `nearer`."""
        return Offset(self.offset_s + nearer.offset_s, self.error_s + nearer.error_s)


def clock_identity() -> str:
    """Equal in two processes only if they read one clock: a boot of a host, and a namespace of time on it."""
    info = time.get_clock_info("perf_counter")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = str(Path("/proc/self/ns/time").readlink())
    except OSError:
        # On other systems clocks of one host count from anywhere as well.
        return f"{socket.gethostname()} {info.implementation} of process {time.perf_counter_ns()}"
    return f"{socket.gethostname()} {info.implementation} {boot} {namespace}"


def align(board: Board, leaders: Sequence[int], leader: int, now: Callable[[], float] = time.perf_counter) -> Offset:
    """The offset of this rank's clock to that of the first leader. All ranks of `board` call this alike.

    Args:
        leaders: one rank for each clock.
        leader: the one of this rank's clock.

    Raises:
        ExecutionError: another rank does not answer in time.
    """
    if board.rank != leader:
        return _parse(board.read(f"clock/{leader}", of=leader))
    place = leaders.index(leader)
    own = Offset()
    if place > 0:
        own = ask(board, leaders[(place - 1) // FAN_OUT], now)
    board.post(f"clock/{leader}", json.dumps([own.offset_s, own.error_s]))
    for child in leaders[place * FAN_OUT + 1 : (place + 1) * FAN_OUT + 1]:
        answer(board, child, now)
    return own


def ask(board: Board, parent: int, now: Callable[[], float]) -> Offset:
    """The offset to the reference, by the clock and the offset of `parent`, which calls `answer`."""
    best: Offset | None = None
    for i in range(ROUNDS):
        asked_s = now()
        board.post(f"ask/{board.rank}/{i}", "")
        board.await_note(f"answer/{board.rank}/{i}", of=parent)
        answered_s = now()
        there_s = float(board.read(f"answer/{board.rank}/{i}", of=parent))
        found = Offset(there_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)
        if best is None or found.error_s < best.error_s:
            best = found
    assert best is not None
    return best.beyond(_parse(board.read(f"clock/{parent}", of=parent)))


def answer(board: Board, child: int, now: Callable[[], float]) -> None:
    """Tell `child` the time as often as it asks."""
    for i in range(ROUNDS):
        board.await_note(f"ask/{child}/{i}", of=child)
        board.post(f"answer/{child}/{i}", repr(now()))


def _parse(text: str) -> Offset:
    return Offset(*json.loads(text))
