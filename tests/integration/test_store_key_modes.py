"""The modes of keys in a real store: while lanes release, in segments, and through a file into another store."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from delayer.amqp.properties import Properties
from delayer.amqp.values import Outgoing
from delayer.core.marks import LAST_DUE
from delayer.core.message import REPLACE, KeyMode
from delayer.store.segments import catalog, restore
from tests.integration.cli import Run
from tests.integration.lanes_shared import Process, migrated, running
from tests.integration.segments_store import restore_all
from tests.integration.test_import_jsonl import other_store
from tests.integration.test_store_keys_packed import LATER_MS, bodies, park
from tests.support.place import eventually
from tests.support.rows import compact, conserved
from tests.support.servers import Postgres
from tests.support.store import blocked, opened, owned, parcel, sql

KEYS = [b"a", b"b", b"c"]
KEEP = KeyMode(keep=True)
CEILING_MS = 300


class Sent(NamedTuple):
    """A message, with the time before its batch was applied and the time after it, and the store's clock then."""

    began: float
    ended: float
    ended_ms: int


class Traffic:
    """Batches of messages under a few keys, into a store that releases at the same time."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.sent: dict[bytes, list[Sent]] = defaultdict(list)
        """By key, in their order. The body of a message is its key and its place here."""

    async def run(self, seed: int, seconds: float, mode: KeyMode, longest_ms: int) -> None:
        chance, end = random.Random(seed), time.monotonic() + seconds
        self.process.backlog.begin_term()
        while time.monotonic() < end:
            now_ms, began = self.process.now_upper_ms(), time.monotonic()
            parcels, count = [], dict.fromkeys(KEYS, 0)
            for _ in range(chance.randrange(1, 6)):
                key = chance.choice(KEYS)
                body = b"%s %d" % (key, len(self.sent[key]) + count[key])
                count[key] += 1
                parcels.append(parcel(now_ms + chance.randrange(longest_ms), body, key=key, mode=mode))
            await self.process.backlog.apply(parcels)
            one = Sent(began, time.monotonic(), self.process.now_upper_ms())
            for key, n in count.items():
                self.sent[key] += [one] * n
            await asyncio.sleep(chance.random() * 0.02)

    def published(self, key: bytes) -> list[tuple[int, float, Outgoing]]:
        """The place, time and message of each publish under ``key``."""
        named = ((one.body.split(), at, one) for at, one in self.process.publisher.published)
        return [(int(place), at, one) for (of, place), at, one in named if of == key]


async def released(database: str) -> None:
    """Wait until nothing waits, and check the law of conservation."""
    async with sql(database) as admin:
        await eventually(lambda: admin.fetchval("SELECT count(*) FROM message"), lambda waiting: waiting == 0)
        await eventually(
            lambda: conserved(admin), lambda found: found["parked"] == found["released"] + found["cancelled"]
        )
        assert await admin.fetchval("SELECT count(*) FROM message_key") == 0


@pytest.mark.parametrize("seed", range(2))
async def test_keep_drops_no_message_whose_first_one_is_published_already(database: str, seed: int) -> None:
    """A consumer that reads the state at the time of the message thus misses no change."""
    await migrated(database)
    async with running(database) as process:
        traffic = Traffic(process)
        await traffic.run(seed, 4.0, KEEP, longest_ms=150)
        await released(database)
    for key, sent in traffic.sent.items():
        published = traffic.published(key)
        places = [place for place, _, _ in published]
        assert places == sorted(set(places)), "each once, in their order"
        assert 5 < len(places) < len(sent), "some were dropped"
        assert places[0] == 0
        for place, one in enumerate(sent):
            if place not in places:
                first, at, _ = [found for found in published if found[0] < place][-1]
                assert at > one.began, f"{place} was dropped, but {first} was published before"


@pytest.mark.parametrize("seed", range(2))
async def test_debounce_publishes_the_newest_within_the_ceiling_of_the_first(database: str, seed: int) -> None:
    await migrated(database)
    async with running(database) as process:
        traffic = Traffic(process)
        await traffic.run(seed, 4.0, KeyMode(ceiling_ms=CEILING_MS), longest_ms=2_000)
        await released(database)
    for key, sent in traffic.sent.items():
        places = [place for place, _, _ in traffic.published(key)]
        assert places == sorted(set(places)), "each once, in their order"
        assert 5 < len(places) < len(sent), "some were replaced"
        assert places[-1] == len(sent) - 1, "the newest"
        first = 0
        for place, _, one in traffic.published(key):
            due = Properties.parse(one.properties).get(LAST_DUE)
            assert due is not None
            latest_ms = max(sent[first].ended_ms + CEILING_MS, sent[place].ended_ms)  # At once, if the ceiling passed.
            assert int(str(due.value)) <= latest_ms, f"{place}, of the burst that {first} began"
            first = place + 1


async def first_parked_ms(database: str) -> int:
    async with sql(database) as admin:
        found: int = await admin.fetchval("SELECT parked_at FROM message")
        return found


async def test_a_message_in_a_segment_keeps_its_key_and_its_burst(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pyarrow, and without a change of the segment by keep."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        await park(store, lane, b"k", body=b"first")
        first_ms = await first_parked_ms(database)
        await park(store, lane, b"l", b"m", body=b"old")
        await compact(admin)
        due_ms = store.now_upper_ms() + LATER_MS
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "pyarrow", None)
            await store.park(lane, [parcel(due_ms, b"dropped", key=key, mode=KEEP) for key in (b"k", b"l")], [b"m"])
            assert (await catalog.list_segments(admin))[0].messages == 2
            mode = KeyMode(ceiling_ms=LATER_MS)
            await store.park(lane, [parcel(due_ms + LATER_MS, b"new", key=b"k", mode=mode)], [])
        assert await bodies(admin) == {b"k": b"new", b"l": b"old"}
        found = await admin.fetchrow("SELECT due_at, parked_at FROM message")
        assert tuple(found) == (first_ms + LATER_MS, first_ms)
        await compact(admin)
        await restore_all(admin)
        await store.park(lane, [parcel(due_ms + LATER_MS, b"newer", key=b"k", mode=mode)], [])
        found = await admin.fetchrow("SELECT due_at, parked_at FROM message WHERE key = 'k'")
        assert tuple(found) == (first_ms + LATER_MS, first_ms)
        assert (await conserved(admin))["cancelled"] == 5


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_keep_waits_for_a_restore(database: str, end: str) -> None:
    """It finds a row afterwards, or the segment; and replaces another key's message in the same batch."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin, sql(database) as other:
        await park(store, lane, b"k", b"l", body=b"old")
        await compact(admin)
        transaction = other.transaction()
        await transaction.start()
        await restore.restore_one(other, catalog.FOREVER_MS)
        due_ms = store.now_upper_ms() + LATER_MS
        parcels = [parcel(due_ms, b"new", key=key, mode=mode) for key, mode in ((b"k", KEEP), (b"l", REPLACE))]
        change = asyncio.create_task(store.park(lane, parcels, []))
        await blocked(admin, "%FROM segment%FOR UPDATE%")
        await getattr(transaction, end)()
        await change
        assert await bodies(admin) == {b"k": b"old", b"l": b"new"}


async def park_both(database: str, bodies_of: Sequence[bytes], more_ms: int = 0) -> list[tuple[object, ...]]:
    """Debounce under key k, keep under key l, and return what waits."""
    async with opened(database) as store, owned(store) as [lane], sql(database) as admin:
        due_ms = store.now_upper_ms() + LATER_MS + more_ms
        modes = (b"k", KeyMode(ceiling_ms=LATER_MS)), (b"l", KEEP)
        await store.park(
            lane, [parcel(due_ms, body, key=key, mode=mode) for body in bodies_of for key, mode in modes], []
        )
        return [
            tuple(row) for row in await admin.fetch("SELECT key, body, due_at, parked_at FROM message ORDER BY key")
        ]


async def test_a_burst_survives_an_export_and_an_import(
    delayer: Run, database: str, postgres: Postgres, tmp_path: Path
) -> None:
    file = tmp_path / "backlog.jsonl"
    [(*_, first_ms), (*_, kept_due_ms, kept_ms)] = await park_both(database, [b"first"])
    delayer("export", str(file))
    async with other_store(postgres) as target:
        delayer("import", "jsonl", "run", str(file), "--unverified", "--yes", DELAYER_STORE__URL=target)
        assert await park_both(target, [b"second", b"third"], more_ms=5_000) == [
            (b"k", b"third", int(str(first_ms)) + LATER_MS, first_ms),
            (b"l", b"first", kept_due_ms, kept_ms),
        ]
