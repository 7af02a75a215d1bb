"""Other kinds of Postgres: a hot standby, one whose files are small enough to be limited, one on a small disk."""

from __future__ import annotations

import asyncio
import errno
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg

from tests.rig import ports
from tests.rig.postgres import SUPERUSER, Postgres
from tests.rig.processes import Family, StartFailed, tail


class Standby(Postgres):
    """`with Standby(primary) as standby:` copies the primary as it is now, follows it, and can be read."""

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
        """Take the copy now; start() goes on from it later."""
        self._initialize()

    def recover(self, restore_command: str) -> None:
        """Read the archived WAL to its end at the next start, and be a primary then, not a standby."""
        (self._data / "standby.signal").unlink()
        (self._data / "recovery.signal").touch()
        with (self._data / "postgresql.conf").open("a") as config:
            config.write(f"restore_command = '{restore_command}'\narchive_mode = 'off'\n")

    def promote(self) -> None:
        """Become the primary; returns when it is one."""
        self.execute("SELECT pg_promote(true, 60)")

    def follows(self) -> bool:
        """Whether it has replayed all that the primary has written."""
        written = _ask(self._primary, "SELECT pg_current_wal_lsn()::text")
        return bool(_ask(self, f"SELECT pg_last_wal_replay_lsn() >= '{written}'"))


class SmallFiles(Postgres):
    """Its WAL comes in files of one megabyte, so that a limit just above that stops nothing but tables."""

    def _initialize(self) -> None:
        super()._initialize()
        _run(self, "pg_resetwal", "--wal-segsize=1", str(self._data))


class SmallDisk(Postgres):
    """On a disk of its own, of so many megabytes. As root, in a mount namespace of one's own (unshare --mount): then
    nothing stays mounted, whatever happens."""

    def __init__(self, megabytes: int) -> None:
        super().__init__(settings={"max_wal_size": "64MB", "min_wal_size": "32MB"})
        self._disk = self._directory / "disk"
        self._disk.mkdir()
        self._ballast = self._disk / "ballast"
        options = f"size={megabytes}m,mode=0755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self._disk], check=True)
        self._data = self._disk / "data"

    def fill(self) -> None:
        """Somebody else's file takes all the room that is left."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """That file is gone."""
        self._ballast.unlink()

    def answers(self) -> bool:
        return self._is_ready()

    def close(self) -> None:
        self.kill()
        subprocess.run(["umount", "--lazy", self._disk], check=True)
        super().close()


def _run(server: Postgres, program: str, *arguments: str) -> None:
    """One of Postgres's own programs, as the user of the server."""
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

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()
