"""Other kinds of Postgres: a hot standby, one on a small disk, and one behind a connection pooler."""

from __future__ import annotations

import errno
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg

from tests.support import ports
from tests.support.postgres import SUPERUSER, Postgres
from tests.support.processes import Family, StartFailed, find_program, mount_disk, run_apart, tail, unmount_disk

FILLING_EVERY = 0.001
"""Seconds."""


class Standby(Postgres):
    """`with Standby(primary) as standby:` copies the primary's current state, follows it, and can be read."""

    def __init__(self, primary: Postgres) -> None:
        super().__init__()
        self._primary = primary

    def _initialize(self) -> None:
        if self._user:
            self._data.mkdir(mode=0o700)
            shutil.chown(self._data, self._user)
        _run(
            self,
            "pg_basebackup", "--host", ports.HOST, "--port", str(self._primary.port), "--username", SUPERUSER,
            "--pgdata", str(self._data), "--write-recovery-conf", "--checkpoint=fast", "--no-sync",
        )  # fmt: skip
        with (self._data / "postgresql.conf").open("a") as config:
            config.write(f"port = '{self.port}'\n")

    def copy(self) -> None:
        """Take the copy now; start() continues from it later."""
        self._initialize()

    def recover(self, restore_command: str) -> None:
        """At the next start, read the archived WAL to its end and become a primary, not a standby."""
        (self._data / "standby.signal").unlink()
        (self._data / "recovery.signal").touch()
        with (self._data / "postgresql.conf").open("a") as config:
            config.write(f"restore_command = '{restore_command}'\narchive_mode = 'off'\n")

    def promote(self) -> None:
        """Promote it; returns when it is the primary."""
        self.execute("SELECT pg_promote(true, 60)")

    def follows(self) -> bool:
        """Whether it has replayed all that the primary has written."""
        written = _ask(self._primary, "SELECT pg_current_wal_lsn()::text")
        return bool(_ask(self, f"SELECT pg_last_wal_replay_lsn() >= '{written}'"))


class Filler(threading.Thread):
    """Repeatedly lets a file grow until the disk is full. ``full``: the disk was full at least once."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._over = threading.Event()
        self.full = threading.Event()

    def run(self) -> None:
        with self._path.open("ab", buffering=0) as file:
            while not self._over.wait(FILLING_EVERY):
                try:
                    while not self._over.is_set():
                        file.write(bytes(1 << 16))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    self.full.set()

    def end(self) -> None:
        self._over.set()
        self.join()
        self._path.unlink()


class SmallDisk(Postgres):
    """A Postgres with data and WAL on a separate disk of this many megabytes. Raises StartFailed if the machine does
    not allow such a disk.

    ``scarce``: there is no spare WAL file, and a WAL file has one megabyte. On a full disk the WAL then fails first,
    and Postgres stops. Otherwise a table fails first, and Postgres only reports an error.
    """

    def __init__(self, megabytes: int, *, scarce: bool = False) -> None:
        more = {"wal_recycle": "off", "min_wal_size": "2MB"} if scarce else {"min_wal_size": "32MB"}
        super().__init__(settings={"max_wal_size": "64MB", **more})
        self.scarce = scarce
        self._disk = self._directory / "disk"
        self._disk.mkdir()
        self._filler: Filler | None = None
        self._data = self._disk / "data"
        try:
            mount_disk(self._disk, megabytes)
        except StartFailed:
            super().close()
            raise

    def _initialize(self) -> None:
        super()._initialize()
        if self.scarce:
            _run(self, "pg_resetwal", "--wal-segsize=1", str(self._data))

    def fill(self) -> None:
        """A file of another program takes all free space, and any that becomes free, until free()."""
        self._filler = Filler(self._disk / "ballast")
        self._filler.start()
        assert self._filler.full.wait(60), "the disk never became full"

    def free(self) -> None:
        """Delete that file."""
        if self._filler is not None:
            self._filler.end()
            self._filler = None

    def answers(self) -> bool:
        return self._is_ready()

    def ended(self) -> bool:
        """Whether the server exited by itself."""
        return self._family is not None and not self._family.running

    def close(self) -> None:
        self.free()
        self.kill()
        self._free_shared_memory()
        unmount_disk(self._disk)
        super().close()


@contextmanager
def pgbouncer(postgres: Postgres, mode: str) -> Iterator[int]:
    """The port of a PgBouncer in this pool mode. Raises StartFailed if it is not installed."""
    program = find_program("pgbouncer", "/usr/sbin", of="PgBouncer")
    port = ports.reserve()
    config = postgres._directory / f"{port}.ini"
    users = config.with_suffix(".users")
    users.write_text(f'"{SUPERUSER}" ""\n')
    lines = ["[databases]", f"* = host={ports.HOST} port={postgres.port}", "[pgbouncer]", f"listen_addr = {ports.HOST}"]
    lines += [f"listen_port = {port}", "unix_socket_dir =", "auth_type = trust", f"auth_file = {users}"]
    config.write_text("\n".join([*lines, f"pool_mode = {mode}\n"]))
    family = Family([program, config], env={}, cwd=config.parent, log=config.with_suffix(".log"), user=postgres._user)
    try:
        with socket.socket() as client:
            family.wait_ready(lambda: client.connect_ex((ports.HOST, port)) == 0, "PgBouncer")
        yield port
    finally:
        family.kill()


def _run(server: Postgres, program: str, *arguments: str) -> None:
    """Run one of Postgres's own programs as the server's user."""
    argv: Sequence[str | Path] = [server._programs / program, *arguments]
    log = server._directory / f"{program}.log"
    family = Family(argv, env=server._environment, cwd=server._directory, log=log, user=server._user)
    if family.wait(timeout=120) != 0:
        raise StartFailed(f"{program} failed\n{tail(log)}")


def _ask(server: Postgres, sql: str) -> Any:
    async def ask() -> Any:
        connection = await asyncpg.connect(server.url(), timeout=10)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return run_apart(ask())
