"""Free TCP ports that stay ours while a server is down.

A server that is killed and started again needs its old port. So we choose ports outside the kernel's range for
outgoing connections, and reserve them against other test runs for the life of this process.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"

_CANDIDATES = range(15_000, 32_000)
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def reserve() -> int:
    """A port that is free and that no other test run on this machine has reserved."""
    for port in random.sample(_candidates(), 200):
        if _reserved(port) and _is_free(port):
            return port
    raise RuntimeError(f"none of 200 ports tried between {_CANDIDATES.start} and {_CANDIDATES.stop} was free")


def _candidates() -> range:
    """Below the range of outgoing connections where the machine's settings leave room for that."""
    lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else _CANDIDATES.stop
    below = range(_CANDIDATES.start, min(_CANDIDATES.stop, lowest_ephemeral))
    return below if len(below) >= 1000 else _CANDIDATES


def _reserved(port: int) -> bool:
    """Lock the port by an abstract socket: the kernel frees it at every kind of death of its owner."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0delayer-rig-port-{port}")
    except OSError:
        lock.close()
        return False
    lock.detach()  # stays open, unreferenced, for the life of this process
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
