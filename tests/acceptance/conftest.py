"""Stores with a password, one world for each mode, and a place for a daemon."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.acceptance.own_vhost import OwnVhost
from tests.acceptance.world import MODES, World, secret_store_url, world
from tests.integration.cli import delayer
from tests.support.servers import Postgres, RabbitMQ

__all__ = ["delayer"]


@pytest.fixture
def schema(database: str) -> str:
    """The name of a fresh database with our schema."""
    return database.rpartition("/")[2]


@pytest.fixture
def store(postgres: Postgres, schema: str) -> str:
    """The URL of a fresh store, with a password to recognise."""
    return secret_store_url(postgres, schema)


@pytest.fixture(scope="session", params=MODES)
def any_world(request: pytest.FixtureRequest, rabbitmq: RabbitMQ, postgres: Postgres, template: str) -> Iterator[World]:
    """Each mode in turn."""
    with world(request.param, rabbitmq, postgres, template) as this:
        yield this


class Notices:
    """The notifications that this test's daemons send to systemd."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.heard: list[str] = []

    def said(self, *words: str) -> bool:
        """Whether a datagram since the last match had all these words."""
        with suppress(BlockingIOError):
            while True:
                self.heard.append(self._line.recv(4096).decode())
        found = [at for at, one in enumerate(self.heard) if all(word in one for word in words)]
        if found:
            del self.heard[: found[0] + 1]
        return bool(found)


@pytest.fixture
def notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notices]:
    """A socket like systemd's, for daemons that are started from now on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield Notices(line)


@pytest.fixture
def place(rabbitmq: RabbitMQ) -> Iterator[OwnVhost]:
    """A fresh vhost with a destination, for a daemon of the test's own."""
    vhost = rabbitmq.add_vhost()
    yield OwnVhost.furnished(rabbitmq, vhost)
    rabbitmq.drop_vhost(vhost)
