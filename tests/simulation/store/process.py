"""A real Postgres that shows the simulation's time. No durability: nothing ever kills this process."""

from __future__ import annotations

import mmap
import select
import socket
import struct
import subprocess
from pathlib import Path
from typing import Final, Self

from tests.simulation import clock
from tests.support.postgres import SUPERUSER, Postgres

TEMPLATE: Final = "empty_store"
DATABASE: Final = "store"
_SETTINGS: Final[dict[str, str | int]] = {
    "fsync": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "autovacuum": "off",  # it would run when it likes
    "checkpoint_timeout": "1h",
    "max_connections": 500,
    "deadlock_timeout": "1h",  # the simulation looks for deadlocks, in its own time
    "log_min_messages": "fatal",
}
_INT64: Final = struct.Struct("=q")


class ClockedPostgres(Postgres):
    """``now_us`` is its time of day. Clients connect to the Unix socket at :attr:`address`."""

    def __init__(self) -> None:
        super().__init__(settings=_SETTINGS)
        self._settings = {**self._settings, "unix_socket_directories": str(self._data)}
        self.address = str(self._data / f".s.PGSQL.{self.port}")
        self._file = (self._directory / "clock").open("w+b", buffering=0)
        self._file.write(_INT64.pack(int(clock.EPOCH * 1e6)))
        Path(self._file.name).chmod(0o644)
        self._page = mmap.mmap(self._file.fileno(), _INT64.size)
        library = self._directory / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
        self._environment |= {"LD_PRELOAD": str(library), "SIMULATED_CLOCK": self._file.name}

    def start(self) -> Self:
        super().start()
        self.add_store(TEMPLATE)
        self.control = Control(self.address, "postgres")
        return self

    def close(self) -> None:
        if hasattr(self, "control"):
            self.control.close()
        super().close()
        self._page.close()
        self._file.close()

    def set_clock(self, epoch_seconds: float) -> None:
        self._page[:] = _INT64.pack(int(epoch_seconds * 1e6))

    def renew(self) -> None:
        """An empty store, with our schema."""
        self.set_clock(clock.EPOCH)
        self.control.query(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        self.control.query(f"CREATE DATABASE {DATABASE} TEMPLATE {TEMPLATE}")


class Locked(Exception):
    """Another session has the lock that a NOWAIT asked for."""


class Control:
    """A session for the simulation's own questions, outside of its time. Blocks."""

    def __init__(self, address: str, database: str) -> None:
        self._socket = connect(address)
        parameters = f"user\0{SUPERUSER}\0database\0{database}\0application_name\0simulation\0\0".encode()
        self._ask(struct.pack("!ii", len(parameters) + 8, 196_608) + parameters)

    def query(self, sql: str) -> list[tuple[str | None, ...]]:
        """Run statements. Returns the rows as text. Raises Locked, and RuntimeError with the server's error."""
        text = sql.encode() + b"\0"
        return self._ask(b"Q" + struct.pack("!i", len(text) + 4) + text)

    def numbers(self, sql: str) -> list[int]:
        """The first column of each row, which is an integer."""
        return [int(row[0] or 0) for row in self.query(sql)]

    def close(self) -> None:
        self._socket.close()

    def _ask(self, request: bytes) -> list[tuple[str | None, ...]]:
        self._socket.sendall(request)
        rows: list[tuple[str | None, ...]] = []
        errors, data = [], b""
        while True:
            while len(data) >= 5 and len(data) > (size := int.from_bytes(data[1:5])):
                kind, body, data = data[:1], data[5 : 1 + size], data[1 + size :]
                if kind == b"D":
                    rows.append(_columns(body))
                elif kind == b"E":
                    errors.append(body.decode(errors="replace"))
                elif kind == b"Z":
                    if any("\0C55P03\0" in error for error in errors):
                        raise Locked
                    if errors:
                        raise RuntimeError(f"the simulation's own query failed: {errors}")
                    return rows
            data += (more := self._socket.recv(1 << 16))
            if not more:
                raise RuntimeError(f"Postgres closed the simulation's own session: {errors}")


def connect(address: str) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.connect(address)
    return one


def is_readable(one: socket.socket, seconds: float) -> bool:
    return bool(select.select([one], [], [], seconds)[0])


def _columns(row: bytes) -> tuple[str | None, ...]:
    found: list[str | None] = []
    at = 2
    for _ in range(int.from_bytes(row[:2])):
        size = int.from_bytes(row[at : at + 4], signed=True)
        at += 4
        found.append(None if size < 0 else row[at : at + size].decode())
        at += max(size, 0)
    return tuple(found)
