"""The line that a worker reports on: what systemd does for a service, on a smaller scale."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from delayer.supervisor.state import parse

_SENDER: Final = struct.Struct("3i")
"""struct ucred of unix(7): process, user and group of the sender, vouched for by the kernel."""
_LONGEST: Final = 4096
_AT_ONCE: Final = 32
"""Datagrams read before the loop sees to something else."""


@contextmanager
def listening(heard: Callable[[int, Mapping[str, str]], None]) -> Iterator[int]:
    """Listen until the end of the block; gives the descriptor that a worker gets as its standard input.

    ``heard(pid, fields)`` is called in the running loop for every datagram: a worker that is dead by now may have left
    some behind. A pair of sockets has no address, so nobody else on this host can fill it, and nothing stays behind
    when we are killed; and it holds some hundred datagrams, where one with an address holds ten. Our end closes when
    we end, however that is: that is how a worker learns of it.
    """
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # neither is inherited by itself
    with ours, theirs:
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        loop.add_reader(ours, _receive, ours, heard)
        try:
            yield theirs.fileno()
        finally:
            loop.remove_reader(ours)


def _receive(ours: socket.socket, heard: Callable[[int, Mapping[str, str]], None]) -> None:
    """What is there; the loop calls again if that is not all."""
    for _ in range(_AT_ONCE):
        try:
            # Room for the sender and no more: descriptors that somebody sends along are closed by the kernel.
            datagram, attached, _, _ = ours.recvmsg(_LONGEST, socket.CMSG_SPACE(_SENDER.size))
        except BlockingIOError:
            return
        for level, kind, content in attached:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                heard(_SENDER.unpack(content)[0], parse(datagram))
