"""The workers of one service among each other: the first one serves for all, and asks the others what they counted.

Each of the others listens on an abstract socket that only this machine can see, and answers every connection with its
state as JSON. Nothing can be changed there. Names are made of the supervisor's process id and of what the workers have
in common, and who is at the other end must be the same user as we are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Final

import structlog

from delayer.ops.http.ports import State
from delayer.settings import Settings

log = structlog.get_logger(__name__)

PATIENCE: Final = 1.0
"""Seconds that a worker has to answer: one that takes longer is busy, or stands still."""
LONGEST: Final = 8 << 20
_CREDENTIALS: Final = struct.Struct("3i")


def address(settings: Settings, worker: int) -> str:
    """Where worker number ``worker`` of our supervisor listens."""
    common = hashlib.sha256(f"{settings.broker_url} {settings.store_url} {settings.http.listen}".encode()).hexdigest()
    return f"\0delayer-{os.getppid()}-{common[:16]}-{worker}"


async def answer(settings: Settings, worker: int, state: Callable[[], State], stopping: asyncio.Event) -> None:
    """Answer the first worker until stopping is set. Raises OSError where the name is taken."""

    async def told(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _is_ours(writer):
                writer.write(json.dumps(dict(state())).encode())
                await asyncio.wait_for(writer.drain(), PATIENCE)
        except OSError:  # gone before it heard us; TimeoutError is one of these
            pass
        finally:
            writer.close()

    # Bound here: uvloop would take a name that begins with a null for one of a file.
    line = socket.socket(socket.AF_UNIX)
    try:
        line.setblocking(False)
        line.bind(address(settings, worker))
        server = await asyncio.start_unix_server(told, sock=line)
    except OSError:
        line.close()
        raise
    async with server:
        await stopping.wait()


async def ask(settings: Settings, worker: int) -> State | None:
    """The state of another worker; None if it does not say it."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.setblocking(False)
        line.connect(address(settings, worker))  # at once, or not at all: nobody listens, or too many wait
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_unix_connection(sock=line, limit=LONGEST)
            try:
                if not _is_ours(writer):
                    return None
                found: State = json.loads(await reader.read(-1))
            finally:
                writer.close()
    except (OSError, ValueError):
        line.close()
        return None
    return found


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    line = writer.get_extra_info("socket")
    _, uid, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.getuid())
