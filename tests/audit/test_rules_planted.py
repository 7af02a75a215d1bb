"""A real store with every violation planted once: each is found, and nothing else; and nothing in it before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from delayer.audit import extract, judging
from delayer.audit.findings import Report
from delayer.settings.secret import SecretUrl
from delayer.store import compacting, envelope
from delayer.store.partitions import DAY_MS, bounds_of, name_of
from tests.audit.backlog import fill
from tests.audit.rows import properties, said
from tests.conformance.store_contract import owned, parcel
from tests.integration.test_store_lane import opened, sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.deadline(600)

WEEK_MS = 7 * DAY_MS
SEGMENT_ROWS = 40
BAD = b"\x00\x80\x09id"
"""Properties that announce a message id of nine bytes and have two."""


@contextmanager
def unwatched(_name: str) -> Iterator[None]:
    yield


async def audited(spark: SparkSession, database: str, work: str) -> Report:
    def take() -> Report:
        place = Path(work, str(len(list(Path(work).iterdir())))).as_uri()
        return judging.run(extract.take(spark, SecretUrl(database), place, unwatched))

    return await asyncio.to_thread(take)


async def build(database: str) -> None:
    """A sound store as daemons and a compaction leave it: rows near and far, keys, held ones, segments, a cancelled one
    in a segment. Lanes 1 and 2; nobody owns them, and nothing is due soon."""
    async with opened(database) as store:
        await fill(store, 300)
        now = store.now_ms()
        async with owned(store, 2) as lanes, sql(database) as connection:
            assert [lane.number for lane in lanes] == [1, 2]
            for window in (await compacting.windows(connection, now + WEEK_MS, SEGMENT_ROWS))[:5]:
                assert await compacting.compact_one(connection, window, rows=SEGMENT_ROWS)
            near = [
                parcel(now + DAY_MS + n * 60_000, b"near %d" % n, properties=properties(b"%d" % n)) for n in range(40)
            ]
            await store.park(lanes[0], near, [])
            await store.park(lanes[1], [parcel(now + 500 * DAY_MS + n, b"far %d" % n) for n in range(5)], [])
            keyed = [parcel(now + 2 * DAY_MS + n, b"keyed %d" % n, key=b"key %d" % n) for n in range(6)]
            await store.park(lanes[1], keyed, [])
            await store.park(lanes[1], [parcel(now + 2 * DAY_MS, b"later", key=b"key 0")], [b"key 5"])
            await store.hold(lanes[0], [(parcel(now - 9, b"held"), "no route")])
            await connection.execute("UPDATE held SET retry_at = now() + interval '1 day'")
            await cancel_in_segment(connection)


async def cancel_in_segment(connection: asyncpg.Connection) -> None:
    """One message of the first segment is cancelled, as the store does it."""
    segment = await connection.fetchrow("SELECT id, lane, first_id FROM segment ORDER BY id LIMIT 1")
    await connection.execute("INSERT INTO segment_cancelled VALUES ($1, $2)", segment["id"], segment["first_id"])
    await connection.execute("UPDATE segment SET cancelled = cancelled + 1 WHERE id = $1", segment["id"])
    await count(connection, segment["lane"], compacted=-1, cancelled=1)


async def count(connection: asyncpg.Connection, lane: int, **kinds: int) -> None:
    for kind, n in kinds.items():
        await connection.execute(
            "INSERT INTO counter AS c VALUES ($1, $2, $3) ON CONFLICT (lane, kind) DO UPDATE SET n = c.n + $3",
            lane,
            kind,
            n,
        )


async def test_nothing_is_found_in_a_sound_store(spark: SparkSession, database: str, work: str) -> None:
    await build(database)
    report = await audited(spark, database, work)
    assert said(report) == []
    totals = report.totals
    assert totals.segments == 5
    assert (totals.waiting, totals.held, totals.keyed) == (totals.expected, 1, 5)
    assert totals.waiting + totals.packed == 300 + 40 + 5 + 5 - 1
    assert sum(bar.messages for bar in report.calendar.days) == totals.waiting + totals.packed
    assert report.calendar.largest[0].size > 0
    assert {lane.number: lane.alive for lane in report.lanes} == {1: False, 2: False}


async def test_every_violation_planted_once_is_found_and_nothing_else(
    spark: SparkSession, database: str, work: str
) -> None:
    await build(database)
    async with sql(database) as connection:
        planted = await Planting(connection).everything()
    report = await audited(spark, database, work)
    assert sorted(said(report)) == sorted(planted)
    assert len({found.rule for found in report.findings}) == 7
    clean = [run.rule for run in report.rules if not run.violations and not run.warnings]
    assert clean == ["peaks"]


class Planting:
    """Each method plants one violation and says what is to be found. Each takes messages that no other one takes, and
    keeps the counters right but for the ones that it is about."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._taken = 0

    async def everything(self) -> list[tuple[str, str, str, int]]:
        found = []
        for plant in (
            self.conservation,
            self.checksum,
            self.unknown_format,
            self.bad_properties,
            self.partition,
            self.overdue,
            self.unknown_lane,
            self.parked_twice,
            self.one_id_twice,
            self.key_collision,
            self.unreachable_key,
            self.dangling_key,
            self.segment_digest,
            self.segment_count,
            self.segment_range,
            self.segment_broken,
            self.tombstone_lost,
        ):
            found += await plant()
        return found

    async def _one(self) -> int:
        """The id of a sound message of lane 1, due in a day, that nobody took yet."""
        self._taken += 1
        found: int = await self._connection.fetchval(
            "SELECT id FROM message WHERE lane = 1 AND body LIKE 'near %' ORDER BY id OFFSET $1 LIMIT 1", self._taken
        )
        return found

    async def _change(self, sets: str, *values: object) -> int:
        one = await self._one()
        assert await self._connection.execute(f"UPDATE message SET {sets} WHERE id = $1", one, *values) == "UPDATE 1"
        return one

    async def conservation(self) -> list[tuple[str, str, str, int]]:
        await count(self._connection, 2, released=1)
        return [("conservation", "violation", "lane 2: waiting", 1)]

    async def checksum(self) -> list[tuple[str, str, str, int]]:
        await self._change("body = 'near but changed'")
        return [("integrity", "violation", "lane 1, waiting: the checksum does not fit its bytes", 1)]

    async def unknown_format(self) -> list[tuple[str, str, str, int]]:
        await self._change("format = 99")
        return [("integrity", "violation", "lane 1, waiting: the format is not known", 1)]

    async def bad_properties(self) -> list[tuple[str, str, str, int]]:
        fits = envelope.checksum(b"delayer.in", b"orders.eu", BAD, b"near")
        await self._change("properties = $2, checksum = $3, body = 'near'", BAD, fits)
        return [("integrity", "violation", "lane 1, waiting: the properties cannot be decoded", 1)]

    async def partition(self) -> list[tuple[str, str, str, int]]:
        """A partition with the name of one day and the bounds of the next."""
        day = await self._connection.fetchval("SELECT (extract(epoch FROM now()) / 86400)::int + 300")
        low, high = bounds_of(day + 1)
        await self._connection.execute(
            f"CREATE TABLE {name_of(day)} PARTITION OF message FOR VALUES FROM ('{low}') TO ('{high}')"
        )
        await self._change(f"due_at = '{low}'")
        return [("integrity", "violation", "lane 1, waiting: it is due outside its partition", 1)]

    async def overdue(self) -> list[tuple[str, str, str, int]]:
        await self._connection.execute("INSERT INTO lane (number, epoch, owner) VALUES (3, 1, 'gone')")
        await self._change("due_at = now() - interval '10 minutes', lane = 3")
        await self._moved(3)
        return [
            ("overdue", "violation", "lane 3", 1),
            ("lanes", "warning", "lane 3: no owner, and messages are due", 1),
        ]

    async def unknown_lane(self) -> list[tuple[str, str, str, int]]:
        await self._change("lane = 77")
        await self._moved(77)
        return [("lanes", "violation", "lane 77: not in the table of lanes", 1)]

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

    async def parked_twice(self) -> list[tuple[str, str, str, int]]:
        await self._copied(await self._one(), "id = nextval('message_id')")
        return [("repeats", "warning", "the same message more than once", 2)]

    async def one_id_twice(self) -> list[tuple[str, str, str, int]]:
        await self._copied(await self._one(), "due_at = due_at + interval '1 hour'")
        return [("repeats", "violation", "one id, more than one message", 2)]

    async def _keyed(self, key: bytes) -> int:
        found: int = await self._connection.fetchval("SELECT id FROM message WHERE key = $1", key)
        return found

    async def key_collision(self) -> list[tuple[str, str, str, int]]:
        await self._copied(await self._keyed(b"key 1"), "id = nextval('message_id')")
        return [("keys", "violation", "several waiting messages have one key", 2)]

    async def unreachable_key(self) -> list[tuple[str, str, str, int]]:
        await self._connection.execute("DELETE FROM message_key WHERE key = $1", b"key 2")
        return [("keys", "violation", "a waiting message that its key does not stand for", 1)]

    async def dangling_key(self) -> list[tuple[str, str, str, int]]:
        await self._connection.execute("INSERT INTO message_key VALUES ('lost', 1, now(), 4711)")
        return [("keys", "violation", "a key that stands for no message", 1)]

    async def _segment(self, number: int) -> asyncpg.Record:
        return await self._connection.fetchrow("SELECT * FROM segment ORDER BY id OFFSET $1 LIMIT 1", number)

    async def tombstone_lost(self) -> list[tuple[str, str, str, int]]:
        segment = await self._segment(0)
        await self._connection.execute("DELETE FROM segment_cancelled WHERE segment = $1", segment["id"])
        fault = "its count of cancelled messages is not that of its tombstones"
        return [("segments", "violation", f"lane {segment['lane']}: {fault}", segment["messages"] - 1)]

    async def segment_digest(self) -> list[tuple[str, str, str, int]]:
        """Not what was packed. Found together with the next one, if both are of one lane."""
        segment = await self._segment(1)
        await self._connection.execute("UPDATE segment SET digest = sha256('other') WHERE id = $1", segment["id"])
        return []

    async def segment_count(self) -> list[tuple[str, str, str, int]]:
        """One message less than it says, and the law of segments holds: it would say that this one was cancelled."""
        segment = await self._segment(2)
        await self._connection.execute(
            "UPDATE segment SET messages = messages + 1, cancelled = cancelled + 1 WHERE id = $1", segment["id"]
        )
        await self._connection.execute("INSERT INTO segment_cancelled VALUES ($1, 4711)", segment["id"])
        lost: Counter[int] = Counter()
        for unreadable in (await self._segment(1), segment):
            lost[unreadable["lane"]] += unreadable["messages"]
        return [("segments", "violation", f"lane {lane}: does not read back", n) for lane, n in lost.items()]

    async def segment_range(self) -> list[tuple[str, str, str, int]]:
        """It says that it begins where it ends."""
        segment = await self._segment(3)
        await self._connection.execute("UPDATE segment SET first_due = last_due WHERE id = $1", segment["id"])
        where = f"lane {segment['lane']}, segment"
        return [("integrity", "violation", f"{where}: it is due outside its segment's range", segment["messages"] - 1)]

    async def segment_broken(self) -> list[tuple[str, str, str, int]]:
        segment = await self._segment(4)
        await self._connection.execute(
            "UPDATE segment SET broken_at = now(), broken = 'it was read from a bad disk' WHERE id = $1", segment["id"]
        )
        return [
            ("segments", "violation", f"lane {segment['lane']}: a daemon could not restore it", segment["messages"])
        ]
