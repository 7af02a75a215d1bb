"""A session of the simulated store, without a server behind it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.simulation.store.session import Session
from tests.simulation.store.standby import Role


@pytest.fixture
def impatient() -> Iterator[None]:
    """A socket raises an exception where it would wait forever."""
    socket.setdefaulttimeout(1.0)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("impatient")
async def test_it_ends_before_its_backend_has_begun(tmp_path: Path) -> None:
    address = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        loop = asyncio.get_running_loop()
        server = Mock(loop=loop, address=address, roles={"a": Role.PRIMARY}, frozen=False, sessions=[], waiting=[])
        server.pace.return_value = 60.0
        transport = SimpleNamespace(close=Mock())
        session = Session(server, "a")
        session.connection_made(transport)  # type: ignore[arg-type]
        parameters = b"user\0postgres\0\0"
        session.data_received(struct.pack("!ii", len(parameters) + 8, 196_608) + parameters)
        session.terminate()
    transport.close.assert_called_once()
    assert server.sessions == []
