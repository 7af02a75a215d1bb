"""Rows with typical bodies: the JSON of a shop's reminders, 300 to 1,000 bytes, alike in their shape and different in
their contents; what compaction is measured on. Made by several processes, run as

    python -m bench.orders put '{"url": …, "seed": 1, "rows": 100000, …}'

Each row is what the daemon would have parked: sound, with properties of its own (a message id, its instant).
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import asyncpg

from bench.plain import number, short
from bench.rows import COUNT_PARKED, KEY, NEW_LANES
from bench.servers import IN, OUT
from delayer.store import envelope, session

TURN = 1_000
"""Rows of one COPY, all of one lane, as a park writes them."""
DAY_MS = 86_400_000
CONTENT_TYPE, HEADERS, DELIVERY_MODE, MESSAGE_ID = 0x8000, 0x2000, 0x1000, 0x0080
FIRST = ("Anna", "Bernd", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jakub", "Kaya", "Lena")
LAST = ("Albers", "Bianchi", "Costa", "Demir", "Eriksson", "Fischer", "Garcia", "Hoffmann", "Ivanova", "Jansen")
GOODS = (
    "Desk lamp, brushed steel", "Office chair, black", "Notebook A5, dotted", "Coffee beans, 1 kg", "USB-C cable, 2 m",
    "Monitor arm", "Whiteboard markers, set of 8", "Standing desk, oak", "Headphones, wireless", "Printer paper, A4",
)  # fmt: skip


def _word(text: str) -> bytes:
    return b"S" + struct.pack(">I", len(text)) + text.encode()


def _uuid(chance: random.Random) -> str:
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def instant(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"


def body(chance: random.Random, now_ms: int, due_ms: int) -> bytes:
    """One reminder."""
    first, last = chance.choice(FIRST), chance.choice(LAST)
    lines = [
        {
            "sku": f"SKU-{chance.randrange(10_000):05d}",
            "name": chance.choice(GOODS),
            "quantity": chance.randint(1, 5),
            "unitPrice": chance.randrange(199, 49_999) / 100,
        }
        for _ in range(chance.randint(1, 6))
    ]
    made = {
        "type": "order.payment.reminder",
        "version": 2,
        "orderId": _uuid(chance),
        "customer": {
            "id": chance.randrange(1_000_000),
            "name": f"{first} {last}",
            "email": f"{first}.{last}{chance.randrange(100)}@example.com".lower(),
            "locale": chance.choice(("de-DE", "en-GB", "fr-FR", "it-IT")),
        },
        "createdAt": instant(now_ms),
        "dueAt": instant(due_ms),
        "currency": "EUR",
        "total": round(sum(one["quantity"] * one["unitPrice"] for one in lines), 2),
        "lines": lines,
    }
    return json.dumps(made, separators=(",", ":")).encode()


def properties(chance: random.Random, due_ms: int) -> bytes:
    """Content type, headers, delivery mode and message id, as a publisher's library sets them."""
    headers = (
        short("__TypeId__") + _word("com.example.shop.PaymentReminder")
        + short("x-deliver-at") + number("", due_ms)[1:]
    )  # fmt: skip
    flags = CONTENT_TYPE | HEADERS | DELIVERY_MODE | MESSAGE_ID
    table = struct.pack(">I", len(headers)) + headers
    return struct.pack(">H", flags) + short("application/json") + table + b"\x02" + short(_uuid(chance))


def rows(order: dict[str, Any], lane: int, chance: random.Random, count: int) -> Iterator[tuple[Any, ...]]:
    """Rows for COPY: ``envelope.COLUMNS``."""
    exchange, key, to = IN.encode(), KEY.encode(), OUT.encode()
    now_ms, first_ms, days = order["now_ms"], order["first_ms"], order["days"]
    for _ in range(count):
        due_ms = first_ms + int(chance.random() * days * DAY_MS)
        content, head = body(chance, now_ms, due_ms), properties(chance, due_ms)
        checksum = envelope.checksum(exchange, key, head, content)
        fixed = (exchange, exchange, key, to, key)
        yield (due_ms, checksum, lane, envelope.FORMAT, *fixed, head, content, None)


async def put(order: dict[str, Any]) -> None:
    """``rows`` rows into ``lanes`` lanes, due over ``days`` days from ``first_ms`` on."""
    chance = random.Random(order["seed"])
    connection = await session.connect(order["url"], "bench orders", {"statement_timeout": "0"})
    try:
        await connection.execute(NEW_LANES, order["lanes"])
        for turn, start in enumerate(range(0, order["rows"], TURN)):
            count, lane = min(TURN, order["rows"] - start), 1 + turn % order["lanes"]
            order["now_ms"] += chance.randint(5, 200)
            await _copy(connection, list(rows(order, lane, chance, count)), lane)
    finally:
        await session.close(connection)


async def _copy(connection: asyncpg.Connection, records: list[tuple[Any, ...]], lane: int) -> None:
    async with connection.transaction():
        await connection.copy_records_to_table("message", records=records, columns=envelope.COLUMNS)
        await connection.execute(COUNT_PARKED, lane, len(records))


if __name__ == "__main__":
    _, verb, what = sys.argv
    assert verb == "put"
    asyncio.run(put(json.loads(what)))
    print(json.dumps({"done": True}))
