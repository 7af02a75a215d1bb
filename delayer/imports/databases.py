"""Connections to other systems' databases, by SQLAlchemy with an asynchronous driver for each."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from typing import Final

from sqlalchemy import URL
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from delayer.core.errors import ERRNO
from delayer.imports.state_machine import BadSource, ImportImpossible, SourceLost

DRIVERS: Final = {
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "mysql": "mysql+asyncmy",
    "mariadb": "mariadb+asyncmy",
    "mssql": "mssql+aioodbc",
}
PACKAGES: Final = {
    "asyncmy": "pip install '.[mysql]' in delayer's checkout",
    "aioodbc": "pip install aioodbc, and Microsoft's driver",
}


FORBIDDEN: Final = frozenset({1044, 1142, 1143, 1227})
"""MySQL's error numbers for missing rights, which its drivers raise as the error of a server in trouble."""
SHOWN: Final = frozenset({"host", "port", "server", "database", "dbname", "service", "driver", "user"})
"""URL parameters that name the database. The rest stay hidden, because drivers accept passwords under many names."""
_EXPECTED: Final = "postgresql://, mysql://, mariadb:// or mssql://, and user:password@host/database"
_ESCAPES: Final = "characters like / @ : # in a password, and an @ elsewhere, are written %2F %40 %3A %23"
_PASSWORD: Final = re.compile("pass|pwd|secret|token")


def database_url(text: str) -> URL:
    """Parse a URL and add an asynchronous driver. Raises BadSource, never showing the text."""
    if text.count("@") > 1 or not text.isprintable():
        # The rest of a password after its first @ would be parsed as the host.
        raise BadSource(f"the source's URL cannot be read: expected {_EXPECTED}; {_ESCAPES}")
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise BadSource(f"the source's URL cannot be read: expected {_EXPECTED}") from None
    if "odbc_connect" in url.normalized_query:  # May contain a password in any form.
        raise BadSource("the source's URL: expected the server, the database and the driver in it, found odbc_connect")
    if url.port is not None and not 0 < url.port <= 65_535:  # The driver would reduce it modulo 65536.
        raise BadSource("the source's URL: expected a port from 1 to 65535")
    if url.drivername not in {*DRIVERS, *DRIVERS.values()}:
        raise BadSource(f"the source's URL: expected {_EXPECTED}, found {url.drivername}://")
    url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
    if url.drivername == DRIVERS["postgresql"] and (mode := url.query.get("sslmode")):
        # Only asyncpg calls this parameter ssl.
        url = url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return url


def secrets(url: URL) -> set[str]:
    """Collect what a driver must not quote: the password, and parameters named like passwords."""
    found = [values for name, values in url.normalized_query.items() if _PASSWORD.search(name.lower())]
    return {str(url.password or ""), *chain.from_iterable(found)} - {""}


def _refused(error: Exception) -> bool:
    """Whether a retry would fail the same way, because something is missing or forbidden."""
    if isinstance(error, ProgrammingError):
        return True
    arguments = error.orig.args if isinstance(error, DBAPIError) and error.orig is not None else ()
    return bool(arguments) and arguments[0] in FORBIDDEN


class Database:
    def __init__(self, url: URL) -> None:
        self._url = url
        self._engine: AsyncEngine | None = None

    @property
    def shown(self) -> str:
        """The URL without its password or parameters that may contain one."""
        query = {name: values for name, values in self._url.normalized_query.items() if name.lower() in SHOWN}
        return self._url.set(password=None, query=query).render_as_string(hide_password=True)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[AsyncConnection]:
        """Open a connection, closed when the block ends. Raises SourceLost, ImportImpossible."""
        try:
            connection = await self._opened()
            try:
                yield connection
            finally:
                await connection.close()
        except (SQLAlchemyError, OSError) as error:
            if _refused(error):
                raise ImportImpossible(
                    f"the database refuses it: {self._described(error)}. Next: see that its user may SELECT, INSERT "
                    "and DELETE there, and create tables"
                ) from error
            raise SourceLost(self._described(error)) from error

    async def _opened(self) -> AsyncConnection:
        """Open a connection. Raises SourceLost, BadSource, and the driver's errors."""
        try:
            if self._engine is None:
                self._engine = create_async_engine(self._url)
            return await self._engine.connect()
        except ModuleNotFoundError as error:
            advice = PACKAGES.get(error.name or "", f"install {error.name}")
            raise SourceLost(f"the driver for {self._url.get_backend_name()} is missing: {advice}") from error
        except (ArgumentError, TypeError, ValueError) as error:  # From a parameter unknown to the driver.
            raise BadSource(
                f"the source's URL has a parameter that its driver cannot use: {self._described(error)}"
            ) from error

    def _described(self, error: Exception) -> str:
        """Describe the error in one line, without the passwords that drivers quote and without Python names."""
        inner = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        # MySQL's errors have a number before the text.
        text = str(inner.args[1] if len(inner.args) > 1 and isinstance(error, DBAPIError) else inner)
        text = ERRNO.sub("", text.strip().split("\n", 1)[0])
        for secret in sorted(secrets(self._url), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text or type(inner).__name__

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None
