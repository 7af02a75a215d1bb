"""The socket that workers report to: what systemd does for a service, on a smaller scale."""

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


@contextmanager
def listening(heard: Callable[[int, Mapping[str, str]], None]) -> Iterator[str]:
    """Listen until the end of the block; gives the address for ``NOTIFY_SOCKET``.

    ``heard(pid, fields)`` is called in the running loop for every datagram, whoever on this host sent it.
    The address is abstract, so no file stays behind when we are killed.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ear:
        ear.setblocking(False)
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ear.bind("")  # the kernel picks a free name
        loop.add_reader(ear, _receive, ear, heard)
        try:
            yield "@" + ear.getsockname()[1:].decode()
        finally:
            loop.remove_reader(ear)


def _receive(ear: socket.socket, heard: Callable[[int, Mapping[str, str]], None]) -> None:
    """Everything that is there."""
    while True:
        try:
            # Room for the sender and no more: descriptors that somebody sends along are closed by the kernel.
            datagram, attached, _, _ = ear.recvmsg(_LONGEST, socket.CMSG_SPACE(_SENDER.size))
        except BlockingIOError:
            return
        for level, kind, content in attached:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                heard(_SENDER.unpack(content)[0], parse(datagram))
