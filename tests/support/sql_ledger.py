"""A ledger whose messages are sent by SQL. Their headers and properties are those that JSON can express."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import asyncpg

from delayer.amqp.values import Outgoing
from tests.support.ledger import PAUSE, Ledger
from tests.support.letters import KEYS, NUMBER, Form, Letter, Letters, long, short, table_of, text
from tests.support.verdict import Owed

_SEND: Final = (
    "SELECT delayer_send($1, $2::bytea, due => $3, exchange => $4, headers => $5, message_id => $6, content_type => $7,"
    " priority => $8, correlation_id => $9, app_id => $10)"
)
LOST: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # for a connection that broke between two statements
    OSError,
    TimeoutError,
)
SHAPES: Final[Sequence[dict[str, Any]]] = (
    {}, {"trace": "größe", "app": "orders"}, {"i": 5, "large": -(2**60), "yes": True}, {"double": 0.1, "void": None},
    {"table": {"inner": 7}, "list": ["x", 1]},
)  # fmt: skip


def encoded(value: Any) -> bytes:  # noqa: PLR0911 - one for each type
    """Type and value as AMQP has them."""
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\x01" if value else b"t\x00"
        case int():
            return long(value)
        case float():
            return b"d" + struct.pack(">d", value)
        case str():
            return text(value.encode())
        case list():
            content = b"".join(map(encoded, value))
            return b"A" + struct.pack(">I", len(content)) + content
    content = table_of((name.encode(), encoded(one)) for name, one in value.items())
    return b"F" + struct.pack(">I", len(content)) + content


class SqlLetters(Letters):
    """Each letter names its due instant, because that is what the function makes of a delay."""

    def form(self, _number: int, _absolute: bool | None) -> Form:
        return Form.SQL

    def headers(self, number: int) -> dict[str, Any]:
        return SHAPES[number % len(SHAPES)]

    def entries(self, headers: dict[str, Any]) -> list[tuple[bytes, bytes]]:
        """The headers as AMQP has them. jsonb orders the names by length first."""
        names = sorted(headers, key=lambda name: (len(name.encode()), name.encode()))
        return [(name.encode(), encoded(headers[name])) for name in names]

    def letter(self, number: int, form: Form, due_ms: int, delay_ms: int) -> Letter:
        body = super().letter(number, form, due_ms, delay_ms).body
        assert body.startswith(NUMBER.pack(number))
        kept = self.entries(self.headers(number))
        said = [*kept, (b"x-deliver-at", long(due_ms))]
        flags, before, after = 0x3080, b"", b"\x02"  # headers, delivery mode, message id
        if number % 2:
            flags |= 0x8800 | 0x0400 | 0x0008  # content type, priority, correlation id, app id
            before, after = short(b"application/x-ledger"), b"\x02\x04" + short(b"correlated")
        after += short(b"id-%d" % number) + (short(b"ledger") if number % 2 else b"")
        return Letter(KEYS + b"%d" % (number % 5), struct.pack(">H", flags) + before, said, kept, after, body)


class SqlLedger(Ledger):
    """``store``: the URL of the store. A message whose commit is in doubt is sent again."""

    store = ""
    statement = _SEND
    _letters: SqlLetters

    def __init__(self, url: str, chance: Any, **names: Any) -> None:
        super().__init__(url, chance, **names)
        self._letters = SqlLetters(chance.getrandbits(64))

    def _arguments(self, message: Outgoing) -> tuple[Any, ...]:
        number = int(message.token)
        owed: Owed = self.account.owed(number)
        due = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=owed.due_ms)
        full = number % 2 == 1
        return (
            message.routing_key.decode(), message.body, due, self._into.decode(),
            json.dumps(self._letters.headers(number)), f"id-{number}", "application/x-ledger" if full else None,
            4 if full else None, "correlated" if full else None, "ledger" if full else None,
        )  # fmt: skip

    async def _confirmed(self, batch: Sequence[Outgoing]) -> None:
        """Send in one transaction, and again until one commits."""
        while True:
            self.note_attempt(batch)
            committing = False
            rows = [self._arguments(one) for one in batch]
            try:
                connection = await asyncpg.connect(self.store, timeout=10)
                try:
                    async with connection.transaction():
                        await connection.executemany(self.statement, rows, timeout=60)
                        committing = True
                    return
                finally:
                    connection.terminate()
            except LOST:
                if committing:
                    self.account.published_twice.update(int(one.token) for one in batch)
            await asyncio.sleep(PAUSE)
