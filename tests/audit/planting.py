"""A sound store, and every violation that the audit knows of planted into it, each once and each by itself.

Each method of :class:`Planting` plants one and says what is to be found. Each takes messages, and a segment, that no
other one takes, and keeps the counters right but for the ones that it is about.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import asyncpg

from delayer.audit import rules
from delayer.store.rows import envelope
from delayer.store.rows.partitions import DAY_MS, bounds_of, name_of
from delayer.store.segments import compact
from delayer.store.segments.compact import Compacted
from tests.audit.backlog import fill
from tests.audit.rows import properties
from tests.support.fakes import WHY
from tests.support.rows import put, row
from tests.support.store import opened, owned, parcel, sql

Findings = list[tuple[str, str, str, int]]
"""What is to be found: rule, severity, subject, count."""

WEEK_MS = 7 * DAY_MS
SEGMENT_ROWS = 40
SEGMENTS = 12
FAR, NEAR = 640, 40
BAD = b"\x00\x80\x09id"
"""Properties that announce a message id of nine bytes and have two."""


async def build(database: str) -> None:
    """A sound store as daemons and a compaction leave it: rows near and far, keys, held ones, segments.
    Lanes 1 and 2; nobody owns them, and nothing is due soon."""
    async with opened(database) as store:
        await fill(store, FAR)
        now = store.now_upper_ms()
        async with owned(store, 2) as lanes, sql(database) as connection:
            assert [lane.number for lane in lanes] == [1, 2]
            for window in (await compact.windows(connection, now + WEEK_MS, SEGMENT_ROWS))[:SEGMENTS]:
                assert await compact.compact_one(connection, window, rows=SEGMENT_ROWS)
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


class Planting:
    """Every violation; :meth:`everything` plants all of them."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._near: list[int] = []
        self._segments = 0

    async def everything(self) -> Findings:
        near = await self._connection.fetch("SELECT id FROM message WHERE lane = 1 AND body LIKE 'near %' ORDER BY id")
        self._near = [id_ for (id_,) in near]
        found: dict[tuple[str, str, str], int] = {}
        for plant in self.plants:
            for rule, severity, subject, count in await plant():
                found[rule, severity, subject] = found.get((rule, severity, subject), 0) + count
        return [(*finding, count) for finding, count in found.items()]

    @property
    def plants(self) -> tuple[Callable[[], Awaitable[Findings]], ...]:
        return (
            # conservation
            self.counted_too_much,
            self.held_too_few,
            # integrity
            self.checksum,
            self.checksum_of_a_held_message,
            self.checksum_in_a_segment,
            self.unknown_format,
            self.bad_properties,
            self.partition,
            # overdue, lanes
            self.overdue,
            self.overdue_in_a_segment,
            self.segment_late,
            self.held_and_not_tried_again,
            self.unknown_lane,
            # repeats
            self.parked_twice,
            self.one_id_twice,
            # destinations
            self.missing_exchange,
            self.missing_queue,
            self.no_binding,
            self.internal_exchange,
            self.only_an_alternate,
            # keys
            self.key_collision,
            self.unreachable_key,
            self.dangling_key,
            # segments
            self.segment_digest,
            self.segment_count,
            self.segment_due,
            self.segment_ids,
            self.segment_size,
            self.segment_broken,
            self.law_of_segments,
        )

    # ---- what to take

    def _one(self) -> int:
        """The id of a sound message of lane 1, due in a day, that nobody took yet."""
        return self._near.pop()

    async def _change(self, sets: str, *values: object) -> int:
        one = self._one()
        changed = await self._connection.execute(f"UPDATE message SET {sets} WHERE id = $1", one, *values)
        assert changed == "UPDATE 1"
        return one

    async def _moved(self, lane: int) -> None:
        await count(self._connection, 1, parked=-1)
        await count(self._connection, lane, parked=1)

    async def _copied(self, one: int, changes: str) -> None:
        await self._connection.execute("CREATE TEMPORARY TABLE copied AS SELECT * FROM message WHERE id = $1", one)
        await self._connection.execute(f"UPDATE copied SET {changes}")
        await self._connection.execute("INSERT INTO message SELECT * FROM copied")
        lane = await self._connection.fetchval("SELECT lane FROM copied")
        await self._connection.execute("DROP TABLE copied")
        await count(self._connection, lane, parked=1)

    async def _segment(self) -> asyncpg.Record:
        """A segment that nobody took yet."""
        self._segments += 1
        return await self._connection.fetchrow("SELECT * FROM segment ORDER BY id OFFSET $1 LIMIT 1", self._segments)

    async def _say(self, segment: asyncpg.Record, sets: str, fault: str, live: int | None = None) -> Findings:
        """Let a segment say something else of itself."""
        await self._connection.execute(f"UPDATE segment SET {sets} WHERE id = $1", segment["id"])
        return [("segments", "violation", f"lane {segment['lane']}: {fault}", live or segment["messages"])]

    async def _packed(self, lane: int, due_in_ms: int, **changes: object) -> Compacted:
        """One message in a segment of its own, in a lane of its own."""
        now_ms = round(await self._connection.fetchval("SELECT extract(epoch FROM now()) * 1000"))
        await put(self._connection, [row(900_000 + lane, now_ms + due_in_ms, lane)._replace(**changes)])
        [window] = [one for one in await compact.windows(self._connection, 0) if one.lane == lane]
        made = await compact.compact_one(self._connection, window)
        assert made is not None and made.messages == 1
        return made

    # ---- conservation

    async def counted_too_much(self) -> Findings:
        await count(self._connection, 2, released=1)
        return [
            ("conservation", "violation", "lane 2: waiting", 1),
            ("conservation", "violation", "all lanes: waiting", 1),
        ]

    async def held_too_few(self) -> Findings:
        await count(self._connection, 1, held=1, parked=1)
        return [("conservation", "violation", "lane 1: held", 1), ("conservation", "violation", "all lanes: held", 1)]

    # ---- integrity

    async def checksum(self) -> Findings:
        await self._change("body = 'near but changed'")
        return [("integrity", "violation", "lane 1, waiting: the checksum does not fit its bytes", 1)]

    async def checksum_of_a_held_message(self) -> Findings:
        await self._connection.execute("UPDATE held SET body = 'changed' WHERE body = 'held 0'")
        return [("integrity", "violation", "lane 1, held: the checksum does not fit its bytes", 1)]

    async def checksum_in_a_segment(self) -> Findings:
        await self._packed(11, 10 * DAY_MS, body=b"changed")
        return [("integrity", "violation", "lane 11, segment: the checksum does not fit its bytes", 1)]

    async def unknown_format(self) -> Findings:
        await self._change("format = 99")
        return [("integrity", "violation", "lane 1, waiting: the format is not known", 1)]

    async def bad_properties(self) -> Findings:
        fits = envelope.checksum(b"delayer.in", b"orders.eu", BAD, b"near")
        await self._change("properties = $2, checksum = $3, body = 'near'", BAD, fits)
        return [("integrity", "violation", "lane 1, waiting: the properties cannot be decoded", 1)]

    async def partition(self) -> Findings:
        """A partition with the name of one day and the bounds of the next: what is in it is due outside, and what is
        due on the day of its name is in the default one."""
        day = await self._connection.fetchval("SELECT (extract(epoch FROM now()) / 86400)::int + 300")
        low, high = bounds_of(day + 1)
        await self._connection.execute(
            f"CREATE TABLE {name_of(day)} PARTITION OF message FOR VALUES FROM ('{low}') TO ('{high}')"
        )
        await self._change(f"due_at = '{low}'")
        await self._change(f"due_at = '{bounds_of(day)[0]}'")
        return [("integrity", "violation", "lane 1, waiting: it is due outside its partition", 2)]

    # ---- overdue, lanes

    async def overdue(self) -> Findings:
        await self._connection.execute("UPDATE lane SET owner = 'gone' WHERE number = 3")
        await self._change("due_at = now() - interval '10 minutes', lane = 3")
        await self._moved(3)
        return [
            ("overdue", "violation", "lane 3", 1),
            ("lanes", "warning", "lane 3: no owner, and messages are due", 1),
        ]

    async def overdue_in_a_segment(self) -> Findings:
        await self._packed(12, -600_000)
        return [
            ("overdue", "violation", "segments of lane 12", 1),
            ("segments", "violation", f"lane 12: {rules.LATE}", 1),
        ]

    async def held_and_not_tried_again(self) -> Findings:
        await self._connection.execute("UPDATE held SET retry_at = now() - interval '10 minutes' WHERE body = 'held 1'")
        return [("overdue", "violation", "lane 1: held, and not tried again in time", 1)]

    async def unknown_lane(self) -> Findings:
        await self._change("lane = 77")
        await self._moved(77)
        return [("lanes", "violation", "lane 77: not in the table of lanes", 1)]

    # ---- repeats

    async def parked_twice(self) -> Findings:
        await self._copied(self._one(), "id = nextval('message_id')")
        return [("repeats", "warning", "the same message more than once", 2)]

    async def one_id_twice(self) -> Findings:
        await self._copied(self._one(), "due_at = due_at + interval '1 hour'")
        return [("repeats", "violation", "one id, more than one message", 2)]

    # ---- destinations: what tests/audit/test_rules_planted.py declares

    async def missing_exchange(self) -> Findings:
        await self._change("to_exchange = 'nowhere'")
        return [("destinations", "violation", 'exchange "nowhere"', 1)]

    async def missing_queue(self) -> Findings:
        await self._change("to_exchange = '', to_key = 'no.such.queue'")
        return [("destinations", "violation", 'queue "no.such.queue"', 1)]

    async def no_binding(self) -> Findings:
        await self._change("to_key = 'nobody'")
        return [("destinations", "violation", 'exchange "delayer.out", key "nobody"', 1)]

    async def internal_exchange(self) -> Findings:
        await self._change("to_exchange = 'inside'")
        return [("destinations", "violation", 'exchange "inside"', 1)]

    async def only_an_alternate(self) -> Findings:
        await self._change("to_exchange = 'spared'")
        return [("destinations", "warning", 'exchange "spared", key "orders.eu"', 1)]

    # ---- keys

    async def _keyed(self, key: bytes) -> int:
        found: int = await self._connection.fetchval("SELECT id FROM message WHERE key = $1", key)
        return found

    async def key_collision(self) -> Findings:
        await self._copied(await self._keyed(b"key 1"), "id = nextval('message_id')")
        return [("keys", "violation", "several waiting messages have one key", 2)]

    async def unreachable_key(self) -> Findings:
        await self._connection.execute("DELETE FROM message_key WHERE key = $1", b"key 2")
        return [("keys", "violation", "a waiting message that its key does not stand for", 1)]

    async def dangling_key(self) -> Findings:
        await self._connection.execute("INSERT INTO message_key VALUES ('lost', 1, now(), 4711)")
        return [("keys", "violation", "a key that stands for no message", 1)]

    # ---- segments

    async def segment_digest(self) -> Findings:
        return await self._say(await self._segment(), "digest = sha256('other')", rules.UNREADABLE)

    async def segment_count(self) -> Findings:
        """One message less than it says; the law of segments holds, as the counters were told of one more."""
        segment = await self._segment()
        await count(self._connection, segment["lane"], parked=1, compacted=1)
        return await self._say(segment, "messages = messages + 1", rules.UNREADABLE, segment["messages"] + 1)

    async def segment_due(self) -> Findings:
        """It says that it begins where it ends: it would be restored too late."""
        return await self._say(await self._segment(), "first_due = last_due", rules.DUE)

    async def segment_ids(self) -> Findings:
        return await self._say(await self._segment(), "ids[1] = 4711", rules.IDS)

    async def segment_size(self) -> Findings:
        return await self._say(await self._segment(), "raw_bytes = raw_bytes + 1", rules.SIZE)

    async def segment_broken(self) -> Findings:
        return await self._say(
            await self._segment(), "broken_at = now(), broken = 'it was read from a bad disk'", rules.MARKED
        )

    async def segment_late(self) -> Findings:
        await self._packed(13, 1_800_000)
        return [("segments", "violation", f"lane 13: {rules.LATE}", 1)]

    async def law_of_segments(self) -> Findings:
        """The counters know of a message in a segment that is in none."""
        await count(self._connection, 2, parked=1, compacted=1)
        return [("segments", "violation", "all segments: compacted - restored", 1)]
