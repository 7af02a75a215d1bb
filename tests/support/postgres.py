"""A Postgres of our own: with fsync, because tests of promises need it, and with little memory."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import asyncpg

from tests.support import ports
from tests.support.processes import (
    Family,
    Server,
    StartFailed,
    clean_environment,
    make_directory,
    remove_directory,
    run_apart,
    tail,
)

SUPERUSER = "postgres"

_SETTINGS: Mapping[str, str | int] = {
    "listen_addresses": ports.HOST,
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "64MB",
    "max_connections": 200,
    "max_wal_size": "512MB",
    "dynamic_shared_memory_type": "mmap",  # inside the data directory: a kill leaves no file in /dev/shm
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %d ",
}


class Postgres(Server):
    """`settings` are added to postgresql.conf. `tls`: certificate and key, PEM files, for clients that request TLS. The
    server trusts every user of this machine.
    """

    def __init__(
        self, *, settings: Mapping[str, str | int] | None = None, tls: tuple[Path, Path] | None = None
    ) -> None:
        self.port = ports.reserve()
        self._programs = _find_programs()
        self._user = _unprivileged_user() if os.geteuid() == 0 else None
        self._directory = make_directory()
        self._data = self._directory / "data"
        self._settings = {**_SETTINGS, **(self._secured(*tls) if tls else {}), **(settings or {})}
        self._log = self._directory / "postgres.log"
        self._environment = clean_environment("PG", "LC_", "LANG") | {"HOME": str(self._directory), "LC_ALL": "C.UTF-8"}

    def start(self) -> Self:
        if not self._data.exists():
            self._initialize()
        self._family = Family(
            [self._programs / "postgres", "-D", self._data],
            env=self._environment,
            cwd=self._data,
            log=self._log,
            user=self._user,
            farewell=signal.SIGQUIT,  # exits immediately, and frees its shared memory
        )
        self._family.wait_ready(self._is_ready, "Postgres")
        return self

    def stop(self) -> None:
        """A fast shutdown: it ends sessions and writes a checkpoint."""
        self._end(signal.SIGINT, grace=30)

    def close(self) -> None:
        if self._family:
            self._end(signal.SIGQUIT, grace=5)
        else:
            self._free_shared_memory()
        remove_directory(self._directory)

    @property
    def data(self) -> Path:
        """The directory of its files, for tests that damage them while it is stopped."""
        return self._data

    @property
    def programs(self) -> Path:
        """The directory of Postgres's own programs: pg_dump, psql and so on."""
        return self._programs

    def url(self, database: str = "postgres", *, port: int | None = None, user: str = SUPERUSER) -> str:
        """postgresql:// URL over TCP; `port` for a proxy before it."""
        return f"postgresql://{user}@{ports.HOST}:{port or self.port}/{database}"

    def tls_url(self, database: str, ca: Path, *, host: str = "localhost") -> str:
        """The same with everything verified."""
        verified = f"sslmode=verify-full&sslrootcert={ca}"
        return f"postgresql://{SUPERUSER}@{host}:{self.port}/{database}?{verified}"

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def add_database(self, name: str | None = None, *, template: str = "template1", more: str = "") -> str:
        """A fresh database, a copy of `template` (which must have no connections); returns its name."""
        name = name or f"test_{secrets.token_hex(6)}"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" {more}')
        return name

    def add_store(self, name: str | None = None) -> str:
        """A fresh database with our schema and no connections; returns its name."""
        from delayer.store import upgrades  # alembic is slow to import

        name = self.add_database(name)
        run_apart(upgrades.upgrade(self.url(name)))
        return name

    def drop_database(self, name: str) -> None:
        """Drop the database and its connections."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, sql: str, *, database: str = "postgres") -> str:
        """Run one statement as superuser; for set-up, not for the subject of a test."""

        async def run() -> str:
            connection = await asyncpg.connect(self.url(database), timeout=10)
            try:
                return str(await connection.execute(sql))
            finally:
                await connection.close()

        return run_apart(run())

    def _secured(self, certificate: Path, key: Path) -> dict[str, str | int]:
        """Settings for TLS. Postgres rejects a key that other users can read, so it gets private copies."""
        for name, source in (("server.pem", certificate), ("server.key", key)):
            target = self._directory / name
            shutil.copyfile(source, target)
            target.chmod(0o600)
            if self._user:
                shutil.chown(target, self._user)
        at = self._directory
        return {"ssl": "on", "ssl_cert_file": str(at / "server.pem"), "ssl_key_file": str(at / "server.key")}

    def _initialize(self) -> None:
        if self._user:
            self._data.mkdir(mode=0o700)
            shutil.chown(self._data, self._user)
        command = [
            self._programs / "initdb", "--pgdata", self._data, "--username", SUPERUSER, "--auth", "trust",
            "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync",
        ]  # fmt: skip
        initialize = Family(
            command, env=self._environment, cwd=self._directory, log=self._directory / "initdb.log", user=self._user
        )
        if initialize.wait(timeout=120) != 0:
            raise StartFailed(f"initdb failed\n{tail(initialize.log)}")
        lines = {"port": self.port, "unix_socket_directories": "", **self._settings}
        with (self._data / "postgresql.conf").open("a") as config:
            config.writelines(f"{key} = '{value}'\n" for key, value in lines.items())

    def _is_ready(self) -> bool:
        # asyncpg would leave a socket open for each attempt that a starting server refuses.
        command = [self._programs / "pg_isready", "--quiet", "--host", "127.0.0.1", "--port", str(self.port)]
        return subprocess.run(command, check=False, env=self._environment).returncode == 0

    def _free_shared_memory(self) -> None:
        """A killed server leaves a small System V segment, which only its next start would reuse."""
        try:
            shared_memory = (self._data / "postmaster.pid").read_text().splitlines()[6].split()[1]
        except (OSError, IndexError):
            return
        subprocess.run(["ipcrm", "-m", shared_memory], capture_output=True, check=False)


def _find_programs() -> Path:
    """The directory of the newest Postgres on this machine."""
    installed = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    candidates = sorted(installed, key=lambda path: int(path.parent.name), reverse=True)
    on_path = shutil.which("postgres")
    for directory in [*candidates, *([Path(on_path).resolve().parent] if on_path else [])]:
        if (directory / "initdb").exists() and (directory / "postgres").exists():
            return directory
    raise StartFailed("Postgres is not installed; .ci/setup servers installs it")


def _unprivileged_user() -> str:
    """Postgres refuses to run as root."""
    users = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in users else "nobody"
