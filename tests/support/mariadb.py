"""A MariaDB of our own, for imports from MySQL's kin. It is a source only: delayer keeps no data in it."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
from typing import Any, Self

import asyncmy
from asyncmy.errors import MySQLError

from tests.support import ports
from tests.support.processes import (
    Family,
    Server,
    StartFailed,
    clean_environment,
    find_program,
    make_directory,
    remove_directory,
    run_apart,
    tail,
)


class MariaDB(Server):
    """Every user of this machine can log in as root with PASSWORD, which no output may show."""

    PASSWORD = "s3cret-source"

    def __init__(self) -> None:
        self.port = ports.reserve()
        self._program = find_program("mariadbd", "/usr/sbin", of="MariaDB")
        self._installer = find_program("mariadb-install-db", of="MariaDB")
        self._user = "mysql" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._directory = make_directory()
        self._data = self._directory / "data"
        self._log = self._directory / "mariadb.log"
        self._environment = clean_environment("MYSQL", "MARIADB") | {"HOME": str(self._directory)}

    def start(self) -> Self:
        self._initialize()
        options = {
            "datadir": self._data, "port": self.port, "bind-address": ports.HOST,
            "socket": self._directory / "socket", "pid-file": self._data / "pid",
            "innodb-buffer-pool-size": "64M", "innodb-flush-log-at-trx-commit": 0, "skip-name-resolve": 1,
            "performance-schema": 0, "max-allowed-packet": "64M",
        }  # fmt: skip
        command = [self._program, "--no-defaults", *(f"--{name}={value}" for name, value in options.items())]
        self._family = Family(
            command,
            env=self._environment,
            cwd=self._directory,
            log=self._log,
            user=self._user if os.geteuid() == 0 else None,
            farewell=signal.SIGKILL,
        )
        self._family.wait_ready(self._is_ready, "MariaDB")
        return self

    def stop(self) -> None:
        self._end(signal.SIGTERM, grace=10)

    def close(self) -> None:
        self.stop()
        remove_directory(self._directory)

    def url(self, database: str) -> str:
        return f"mysql://root:{self.PASSWORD}@{ports.HOST}:{self.port}/{database}"

    def add_database(self) -> str:
        """A fresh database; returns its name."""
        name = f"test_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name} CHARACTER SET ascii")
        return name

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name}")

    def execute(self, sql: str, *, password: str = PASSWORD) -> None:
        """Run one statement; for set-up, not for the subject of a test."""

        async def run() -> None:
            connection: Any = await asyncmy.connect(
                host=ports.HOST, port=self.port, user="root", password=password, autocommit=True
            )
            try:
                async with connection.cursor() as cursor:
                    await cursor.execute(sql)
            finally:
                connection.close()

        run_apart(run())

    def _initialize(self) -> None:
        self._data.mkdir(mode=0o700)
        if os.geteuid() == 0:
            shutil.chown(self._data, self._user)
            shutil.chown(self._directory, self._user)
        command = [
            self._installer, "--no-defaults", f"--datadir={self._data}", f"--user={self._user}",
            "--auth-root-authentication-method=normal", "--skip-test-db",
        ]  # fmt: skip
        initialize = Family(command, env=self._environment, cwd=self._directory, log=self._directory / "install.log")
        if initialize.wait(timeout=120) != 0:
            raise StartFailed(f"mariadb-install-db failed\n{tail(initialize.log)}")

    def _is_ready(self) -> bool:
        try:
            self.execute(f"SET PASSWORD FOR 'root'@'127.0.0.1' = PASSWORD('{self.PASSWORD}')", password="")
        except (OSError, MySQLError):  # not yet
            return False
        return True
