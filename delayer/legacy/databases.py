"""Other systems' databases, over SQLAlchemy and an asynchronous driver each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy import URL
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from delayer.legacy.ports import ImportImpossible, SourceLost

DRIVERS: Final = {
    "postgresql": "postgresql+asyncpg",
    "mysql": "mysql+asyncmy",
    "mariadb": "mariadb+asyncmy",
    "mssql": "mssql+aioodbc",
}
PACKAGES: Final = {"asyncmy": "pip install 'delayer[mysql]'", "aioodbc": "pip install aioodbc, and Microsoft's driver"}


def database_url(text: str) -> URL:
    """The URL with an asynchronous driver. Raises ImportImpossible, never showing the text."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ImportImpossible(
            "the source's URL cannot be read: expected DIALECT://user:password@host/database"
        ) from None
    return url.set(drivername=DRIVERS.get(url.drivername, url.drivername))


class Database:
    """Connections to one database."""

    def __init__(self, url: URL) -> None:
        self._url = url
        self._engine: AsyncEngine | None = None

    @property
    def shown(self) -> str:
        """Where it is, without a password."""
        return self._url.set(password=None).render_as_string(hide_password=True)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[AsyncConnection]:
        """A connection for a while. Raises SourceLost, ImportImpossible."""
        try:
            if self._engine is None:
                self._engine = create_async_engine(self._url)
            async with self._engine.connect() as connection:
                yield connection
        except ModuleNotFoundError as error:
            advice = PACKAGES.get(error.name or "", f"install {error.name}")
            raise ImportImpossible(f"the driver for {self._url.get_backend_name()} is missing: {advice}") from error
        except (SQLAlchemyError, OSError) as error:
            raise SourceLost(self._described(error)) from error

    def _described(self, error: Exception) -> str:
        """One line, without what a driver may quote."""
        inner = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        text = str(inner).strip().split("\n", 1)[0]
        password = str(self._url.password or "")
        return f"{type(inner).__name__}: {text.replace(password, '***') if password else text}"

    async def close(self) -> None:
        """Safe to call twice."""
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None
