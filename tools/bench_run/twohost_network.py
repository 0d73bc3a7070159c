"""Two hosts on one machine: two network namespaces, a veth pair between them, a token bucket on either end.

The namespaces have no names. A process of ours in each keeps it alive, and ends when its standard input closes: they are
gone when this process is, however it ends, and nothing of the machine's own network is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, NoReturn

from bench_run.refusal import RefusedError

INTERFACE: Final = "veth0"
NEEDED: Final = "two hosts on one machine need root and the programs `ip` and `tc` (Debian: iproute2)"
_PROGRAMS: Final = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}

# Segments leave the stack in pieces of at most this size, and the bucket holds two of them. With pieces larger than the
# bucket the kernel cuts them up, on the cores that the processes share; a larger bucket would let a link that was idle
# run ahead of its rate: at 400 Mbit/s these are 1.3 ms.
_SEGMENT_BYTES: Final = 32 << 10
_BURST_S: Final = 1.3e-3
# How long a packet may queue before it is dropped. TCP keeps few packets of a connection in a queue of its own host, so
# none is dropped.
_QUEUE_S: Final = 0.05
# Nothing is dropped here, so this one sends what the link takes; one that probes for bandwidth (BBR) leaves it idle at times.
CONGESTION_CONTROL: Final = "reno"
_COMMAND_S: Final = 10.0


@dataclass(frozen=True)
class Host:
    """One of the two: the process that keeps its namespace, and its address."""

    pid: int
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What runs `arguments` on this host; it replaces itself, so the process is that of `arguments`."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *arguments]

    def run(self, arguments: Sequence[str]) -> str:
        """Run `arguments` on this host to their end; what they print."""
        return _run(self.command(arguments))

    def counters(self) -> dict[str, Any]:
        """What went through this host's end of the link: "bytes" and "packets" sent, "drops"."""
        found = json.loads(self.run(["tc", "-j", "-s", "qdisc", "show", "dev", INTERFACE]))
        return {name: found[0][name] for name in ("bytes", "packets", "drops")}


def refuse_if_impossible() -> None:
    """Check what can be known beforehand.

    Raises:
        RefusedError: says what is missing.
    """
    missing = sorted(
        {f"`{program}` (Debian: {package})" for program, package in _PROGRAMS.items() if not shutil.which(program)}
    )
    lacks = [*(["root"] if os.geteuid() else []), *missing]
    if lacks:
        raise RefusedError(f"{NEEDED}; missing here: {', '.join(lacks)}")


@contextmanager
def two_hosts(rate_mbit: float) -> Iterator[tuple[Host, Host]]:
    """Two hosts; what either sends to the other passes at `rate_mbit` (10^6 bits a second, headers included).

    What processes of one host send to one another, under whichever of its addresses, goes through its loopback, unshaped.

    Raises:
        RefusedError: namespaces or links can't be made here.
    """
    refuse_if_impossible()
    with ExitStack() as stack:
        hosts = Host(stack.enter_context(_namespace()), "10.0.0.1"), Host(stack.enter_context(_namespace()), "10.0.0.2")
        burst_bytes = max(2 * _SEGMENT_BYTES, round(rate_mbit * 1e6 / 8 * _BURST_S))
        link = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(hosts[1].pid)]
        hosts[0].run(link)
        for host in hosts:
            host.run(["ip", "link", "set", "lo", "up"])
            # Without an IPv6 address of its own: nothing but the processes' data is on the link.
            segments = ["gso_max_size", str(_SEGMENT_BYTES), "addrgenmode", "none"]
            host.run(["ip", "link", "set", INTERFACE, *segments])
            host.run(["ip", "address", "add", f"{host.address}/24", "dev", INTERFACE])
            bucket = ["rate", f"{round(rate_mbit * 1e6)}bit", "burst", f"{burst_bytes}b", "latency", f"{_QUEUE_S * 1e3:g}ms"]
            host.run(["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket])
            host.run(["ip", "link", "set", INTERFACE, "up"])
            host.run(["sh", "-c", f"echo {CONGESTION_CONTROL} >/proc/sys/net/ipv4/tcp_congestion_control"])
        yield hosts


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM, SIGHUP and Ctrl-C end the program as an exception does, so that it leaves nothing behind; Ctrl-C too
    where a shell lets what it starts in the background ignore it.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _namespace() -> Iterator[int]:
    """A process in a network namespace of its own."""
    command = ["unshare", "--net", "sh", "-c", "echo made; exec cat >/dev/null"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            assert keeper.stderr is not None
            if keeper.stdout.readline().strip() != "made":
                raise RefusedError(f"{NEEDED}; network namespaces can't be made: {keeper.stderr.read().strip()}")
            yield keeper.pid
        finally:
            keeper.kill()


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode:
        raise RefusedError(f"{NEEDED}; `{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout
