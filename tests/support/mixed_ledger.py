"""A ledger whose messages are sent over AMQP, by SQL and over HTTP. One account has what is owed of all three."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.http_ledger import HttpLedger
from tests.support.ledger import Ledger
from tests.support.letters import Form, Letter
from tests.support.sql_ledger import SqlLedger
from tests.support.verdict import Owed


class MixedLedger(Ledger):
    """``publish`` sends over AMQP, ``sql.publish`` by SQL, ``http.publish`` over HTTP. Only this ledger consumes."""

    def __init__(self, url: str, chance: Any, **names: Any) -> None:
        super().__init__(url, chance, **names)
        self.sql, self.http = SqlLedger(url, chance, **names), HttpLedger(url, chance, **names)
        self.sql.account = self.http.account = self.account

    def letter(self, number: int, owed: Owed) -> Letter:
        match owed.form:
            case Form.SQL:
                return self.sql.letter(number, owed)
            case Form.HTTP:
                return self.http.letter(number, owed)
        return super().letter(number, owed)

    @asynccontextmanager
    async def silent(self) -> AsyncIterator[None]:
        async with super().silent(), self.sql.silent(), self.http.silent():
            yield
