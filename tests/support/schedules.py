"""Schedules in a store, for tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import asyncpg

from delayer.amqp.properties import Properties, encode_headers
from delayer.amqp.values import Delivery
from delayer.core.message import Due, Target
from delayer.core.units import DAY_MS
from delayer.format.rows import COLUMNS, stored_row
from delayer.schedule.occurrence import occurrence
from delayer.schedule.record import ScheduleRecord, key_of
from delayer.schedule.rhythm import Every
from delayer.schedule.schedule import SCHEDULE, Schedule
from delayer.store.rows.partitions import PARK_SECONDS, make_missing
from delayer.store.schedules import reading, table
from tests.support.place import Place
from tests.support.raw import Raw

HOUR_MS = 3_600_000
HOURLY = Every(HOUR_MS)


def schedule(name: str = "tick", **values: Any) -> Schedule:
    plain: dict[str, Any] = {
        "id": uuid4(), "name": name, "target": Target(b"delayer.out", b"k"), "rhythm": HOURLY,
        "properties": encode_headers(), "body": b"tick",
    }  # fmt: skip
    return Schedule(**(plain | values))


async def record(connection: asyncpg.Connection, name: str = "tick") -> ScheduleRecord:
    found = await reading.get(connection, name)
    assert found is not None
    return found


async def rewind(connection: asyncpg.Connection, by_ms: int, *names: str) -> ScheduleRecord:
    """Let these schedules (or "tick") look as if their occurrences had waited since before, while no daemon worked.
    Returns the first one."""
    names = names or ("tick",)
    rows, schedules, days = [], [], set()
    for name, waits in (await table.read(connection, names)).items():
        assert waits.waiting_ms is not None
        at_ms = waits.waiting_ms - by_ms
        parcel = occurrence(waits.schedule, at_ms)
        row = dict(zip(COLUMNS, stored_row(parcel, 0), strict=True))
        rows.append((waits.waiting_id, waits.due_ms, row["due_at"], row["properties"], row["checksum"]))
        schedules.append((name, at_ms, key_of(name), row["due_at"]))
        days.add(at_ms // DAY_MS)  # It may be the day before.
    await make_missing(connection, days, PARK_SECONDS)
    async with connection.transaction():
        await connection.executemany(
            "UPDATE message SET due_at = $3, properties = $4, checksum = $5 WHERE id = $1 AND due_at = $2", rows
        )
        await connection.executemany(
            "WITH keyed AS (UPDATE message_key SET due_at = $4 WHERE key = $3)"
            " UPDATE schedule SET waiting_at = $2, settled_at = NULL WHERE name = $1",
            schedules,
        )
    return await record(connection, names[0])


async def check_waiting(connection: asyncpg.Connection, name: str = "tick") -> ScheduleRecord:
    """The schedule, its key and its waiting message agree: one occurrence waits, or none."""
    waits = await record(connection, name)
    keyed = await connection.fetch("SELECT id, due_at, lane FROM message_key WHERE key = $1", key_of(name))
    rows = await connection.fetch("SELECT id, due_at, lane FROM message WHERE key = $1", key_of(name))
    assert keyed == rows, (keyed, rows)
    assert [(row["id"], row["due_at"]) for row in rows] == (
        [] if waits.waiting_id is None else [(waits.waiting_id, waits.due_ms)]
    )
    return waits


def named(due: Due) -> tuple[str, str]:
    """The schedule and the message id of an occurrence."""
    properties = Properties.parse(due.parcel.properties)
    header, message_id = properties.get(SCHEDULE), properties.short("message_id")
    assert header is not None
    assert message_id is not None
    return header.content.decode(), message_id.decode()


class ArrivedOccurrence(NamedTuple):
    id: object
    message_id: bytes | None
    body: bytes


class OccurrenceInbox:
    """The occurrences that came to a place, by schedule and due instant."""

    def __init__(self) -> None:
        self.came: defaultdict[tuple[str, int], list[ArrivedOccurrence]] = defaultdict(list)

    @classmethod
    @asynccontextmanager
    async def open(cls, place: Place) -> AsyncIterator[OccurrenceInbox]:
        inbox = cls()
        async with place.ledger(consume=False), await Raw.connect(place.broker) as raw:

            def arrived(delivery: Delivery) -> None:
                inbox.take(delivery)
                raw.channel.ack(delivery.tag)

            await raw.channel.consume("ledger", arrived, lambda: None)
            yield inbox

    def take(self, delivery: Delivery) -> None:
        properties = Properties.parse(delivery.properties)
        of, due, id_ = (properties.get(b"x-delayer-" + name) for name in (b"schedule", b"due", b"id"))
        assert of and due and id_
        assert isinstance(due.value, int)
        arrived = ArrivedOccurrence(id_.value, properties.short("message_id"), delivery.body)
        self.came[of.content.decode(), due.value].append(arrived)

    def of(self, name: str) -> dict[int, list[ArrivedOccurrence]]:
        """Those of one schedule, by due instant."""
        return {at_ms: came for (one, at_ms), came in sorted(self.came.items()) if one == name}

    def last(self, names: Collection[str]) -> int:
        """The newest time up to which all these schedules have come."""
        return min(max(self.of(name), default=0) for name in names)
