"""A sound store, with every violation known to the audit planted in it once and separately.

Each has its own messages and its own segment, and keeps every counter right except those it violates.
"""

from __future__ import annotations

import asyncpg
import pandas  # noqa: F401 - else pyarrow imports it for its first table, which stops lane heartbeats for seconds

from delayer.audit import faults
from delayer.core.units import DAY_MS
from delayer.format.rows import checksum
from delayer.schedule.record import ScheduleRecord
from delayer.store.rows.partitions import bounds_of, name_of
from delayer.store.schedules import table
from delayer.store.segments import compact
from tests.audit.compacting import fill
from tests.audit.rows import properties
from tests.support.fakes import WHY
from tests.support.rows import put, row
from tests.support.schedules import schedule
from tests.support.store import opened, owned, parcel, sql

Findings = list[tuple[str, str, str, int]]
"""The expected findings: rule, severity, subject, count."""

WEEK_MS = 7 * DAY_MS
SEGMENT_ROWS = 40
SEGMENTS = 12
FAR, NEAR = 640, 40
CANCELLED = 20
"""Messages that were cancelled in segments."""
_PACKED_KEYS = "SELECT key FROM message_key WHERE segment IS NOT NULL ORDER BY due_at LIMIT $1"
BAD = b"\x00\x80\x09id"
"""Properties that announce a message id of nine bytes and have two."""


async def build(database: str) -> None:
    """A sound store as daemons and a compaction leave it: rows near and far, keys, held ones, segments.
    Lanes 1 and 2 have no owner, and nothing is due soon."""
    async with opened(database) as store:
        await fill(store, FAR)
        now = store.now_upper_ms()
        async with owned(store, 2) as lanes, sql(database) as connection:
            assert [lane.number for lane in lanes] == [1, 2]
            for window in (await compact.windows(connection, now + WEEK_MS, SEGMENT_ROWS))[:SEGMENTS]:
                assert await compact.compact_one(connection, window, rows=SEGMENT_ROWS)
            cancelled = await connection.fetch(_PACKED_KEYS, CANCELLED)
            assert len(await store.park(lanes[0], [], [key for (key,) in cancelled])) == CANCELLED
            near = [
                parcel(now + DAY_MS + n * 60_000, b"near %d" % n, properties=properties(b"%d" % n)) for n in range(NEAR)
            ]
            await store.park(lanes[0], near, [])
            await store.park(lanes[1], [parcel(now + 500 * DAY_MS + n, b"far %d" % n) for n in range(5)], [])
            keyed = [parcel(now + 2 * DAY_MS + n, b"keyed %d" % n, key=b"key %d" % n) for n in range(6)]
            await store.park(lanes[1], keyed, [])
            await store.park(lanes[1], [parcel(now + 2 * DAY_MS, b"later", key=b"key 0")], [b"key 5"])
            await store.hold(lanes[0], [(parcel(now - 9, b"held %d" % n), WHY) for n in range(3)])
            await connection.execute("UPDATE held SET retry_at = now() + interval '1 day'")


async def count(connection: asyncpg.Connection, lane: int, **kinds: int) -> None:
    for kind, n in kinds.items():
        await connection.execute(
            "INSERT INTO counter AS c VALUES ($1, $2, $3) ON CONFLICT (lane, kind) DO UPDATE SET n = c.n + $3",
            lane,
            kind,
            n,
        )


ONE = {
    "body = 'near but changed'": ("integrity", "violation", "lane 1, waiting: the checksum does not match its bytes"),
    "format = 99": ("integrity", "violation", "lane 1, waiting: the format is unknown"),
    "to_exchange = 'nowhere'": ("destinations", "violation", 'exchange "nowhere"'),
    "to_exchange = '', to_key = 'no.such.queue'": ("destinations", "violation", 'queue "no.such.queue"'),
    "to_key = 'nobody'": ("destinations", "violation", 'exchange "delayer.out", key "nobody"'),
    "to_exchange = 'inside'": ("destinations", "violation", 'exchange "inside"'),
    "to_exchange = 'spared'": ("destinations", "warning", 'exchange "spared", key "orders.eu"'),
}
"""Changes of one message that waits in lane 1; tests/audit/test_rules_planted.py declares the destinations."""
OTHERS = {
    "UPDATE held SET body = 'changed' WHERE body = 'held 0'":
        ("integrity", "violation", "lane 1, held: the checksum does not match its bytes"),
    "UPDATE held SET retry_at = now() - interval '10 minutes' WHERE body = 'held 1'":
        ("overdue", "violation", "lane 1: held, and not retried in time"),
    "DELETE FROM message_key WHERE key = 'key 2'":
        ("keys", "violation", "a waiting message that its key does not point to"),
    "INSERT INTO message_key VALUES ('lost', 1, now(), 4711)":
        ("keys", "violation", "a key that points to no message"),
}  # fmt: skip
COPIES = {
    "id = nextval('message_id')": ("repeats", "warning", "the same message more than once"),
    "due_at = due_at + interval '1 hour'": ("repeats", "violation", "one id, more than one message"),
}
"""Differences between a message and its copy; the finding counts both."""
SAYS = {
    "digest = sha256('other')": faults.CHANGED,
    "first_due = last_due": faults.DUE,
    "ids[1] = 4711": faults.IDS,
    "raw_bytes = raw_bytes + 1": faults.SIZE,
    "format = 99": faults.NEWER,
    "broken_at = now(), broken = 'it was read from a bad disk'": faults.MARKED,
}
"""Changes of a segment's own columns."""
PACKED = [
    (11, 10 * DAY_MS, {"body": b"changed"}, "integrity", "lane 11, segment: the checksum does not match its bytes"),
    (12, -600_000, {}, "overdue", "segments of lane 12"),
    (13, 1_800_000, {}, "segments", f"lane 13: {faults.LATE}"),
]
"""Packed messages: lane, due instant in milliseconds from now, changes, and the expected rule and subject."""


class Planting:
    """All violations; :meth:`everything` plants them."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._near: list[int] = []

    async def everything(self) -> Findings:
        near = await self._connection.fetch("SELECT id FROM message WHERE lane = 1 AND body LIKE 'near %' ORDER BY id")
        self._near = [id_ for (id_,) in near]
        plants = (
            self._packed,  # first, as it writes the keys of all messages
            self._changed, self._copied, self._segments, self._counters, self._properties, self._partition, self._lanes,
            self._schedules, self._inbox,
        )  # fmt: skip
        return [found for plant in plants for found in await plant()]

    async def _inbox(self) -> Findings:
        """A message that was sent by SQL an hour ago."""
        await self._connection.execute("SELECT delayer_send('k', 'unread')")
        await self._connection.execute("UPDATE delayer_inbox SET sent_at = now() - interval '1 hour'")
        return [("inbox", "violation", faults.UNREAD, 1)]

    async def _change(self, sets: str, *values: object) -> None:
        """Change a message of lane 1 that no other violation uses."""
        changed = await self._connection.execute(f"UPDATE message SET {sets} WHERE id = $1", self._near.pop(), *values)
        assert changed == "UPDATE 1"

    async def _changed(self) -> Findings:
        for sets in ONE:
            await self._change(sets)
        for statement in OTHERS:
            assert (await self._connection.execute(statement)).endswith(" 1"), statement
        return [(*finding, 1) for finding in (*ONE.values(), *OTHERS.values())]

    async def _copied(self) -> Findings:
        for changes in COPIES:
            await self._copy(self._near.pop(), changes)
        await self._copy(
            await self._connection.fetchval("SELECT id FROM message WHERE key = 'key 1'"), "id = nextval('message_id')"
        )
        collides = ("keys", "violation", "several waiting messages have one key")
        return [(*finding, 2) for finding in (*COPIES.values(), collides)]

    async def _copy(self, one: int, changes: str) -> None:
        await self._connection.execute("CREATE TEMPORARY TABLE copied AS SELECT * FROM message WHERE id = $1", one)
        await self._connection.execute(f"UPDATE copied SET {changes}")
        await self._connection.execute("INSERT INTO message SELECT * FROM copied")
        lane = await self._connection.fetchval("SELECT lane FROM copied")
        await self._connection.execute("DROP TABLE copied")
        await count(self._connection, lane, parked=1)

    async def _packed(self) -> Findings:
        """Each in its own segment and its own lane."""
        now_ms = round(await self._connection.fetchval("SELECT extract(epoch FROM now()) * 1000"))
        for lane, due_in_ms, changes, _, _ in PACKED:
            await put(self._connection, [row(900_000 + lane, now_ms + due_in_ms, lane)._replace(**changes)])
            [window] = [one for one in await compact.windows(self._connection, 0) if one.lane == lane]
            made = await compact.compact_one(self._connection, window)
            assert made is not None and made.messages == 1
        late = ("segments", "violation", f"lane 12: {faults.LATE}", 1)
        return [late, *((rule, "violation", subject, 1) for _, _, _, rule, subject in PACKED)]

    async def _segments(self) -> Findings:
        """One segment claims one message more; the counters match, so the law of segments holds."""
        segments = await self._connection.fetch("SELECT id, lane, messages FROM segment ORDER BY id")
        found: dict[str, int] = {}
        for segment, (sets, fault) in zip(segments, [*SAYS.items(), ("messages = messages + 1", "")], strict=False):
            await self._connection.execute(f"UPDATE segment SET {sets} WHERE id = $1", segment["id"])
            if not fault:
                await count(self._connection, segment["lane"], parked=1, compacted=1)
            subject = f"lane {segment['lane']}: {fault or faults.UNREADABLE}"
            found[subject] = found.get(subject, 0) + segment["messages"] + (not fault)
        return [("segments", "violation", subject, messages) for subject, messages in found.items()]

    async def _counters(self) -> Findings:
        """Count released and held messages that do not exist, and a compacted message that is in no segment."""
        await count(self._connection, 2, released=1, parked=1, compacted=1)
        await count(self._connection, 1, held=1, parked=1)
        off = [("lane 2", "waiting"), ("all lanes", "waiting"), ("lane 1", "held"), ("all lanes", "held")]
        law = ("segments", "violation", "all segments: compacted - restored", 1)
        return [law, *(("conservation", "violation", f"{of}: {what}", 1) for of, what in off)]

    async def _properties(self) -> Findings:
        fits = checksum(b"delayer.in", b"orders.eu", BAD, b"near")
        await self._change("properties = $2, checksum = $3, body = 'near'", BAD, fits)
        return [("integrity", "violation", "lane 1, waiting: the properties cannot be decoded", 1)]

    async def _partition(self) -> Findings:
        """A partition with the name of one day and the bounds of the next. Its rows are due outside it, and rows of the
        day of its name are in the default one."""
        day = await self._connection.fetchval("SELECT (extract(epoch FROM now()) / 86400)::int + 300")
        low, high = bounds_of(day + 1)
        await self._connection.execute(
            f"CREATE TABLE {name_of(day)} PARTITION OF message FOR VALUES FROM ('{low}') TO ('{high}')"
        )
        await self._change(f"due_at = '{low}'")
        await self._change(f"due_at = '{bounds_of(day)[0]}'")
        return [("integrity", "violation", "lane 1, waiting: it is due outside its partition", 2)]

    async def _lanes(self) -> Findings:
        """An overdue message in a lane without an owner, and a message in an unknown lane."""
        await self._connection.execute("UPDATE lane SET owner = 'gone' WHERE number = 3")
        await self._change("due_at = now() - interval '10 minutes', lane = 3")
        await self._change("lane = 77")
        for lane in (3, 77):
            await count(self._connection, 1, parked=-1)
            await count(self._connection, lane, parked=1)
        return [
            ("overdue", "violation", "lane 3", 1),
            ("lanes", "warning", "lane 3: no owner, and messages are due", 1),
            ("lanes", "violation", "lane 77: not in the table of lanes", 1),
        ]

    async def _schedules(self) -> Findings:
        """A schedule whose occurrence is gone."""
        await table.put(self._connection, [ScheduleRecord(schedule(), waiting_ms=1, waiting_id=4711)])
        return [("schedules", "violation", faults.UNPLANNED, 1)]
