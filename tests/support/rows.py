"""Messages as rows of a store, written and read back by SQL of our own, from rows and from segments."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import asyncpg
import pyarrow as pa

from delayer.core.units import DAY_MS
from delayer.format.rows import FORMAT
from delayer.format.rows import checksum as checksum_of
from delayer.store.segments import catalog
from delayer.store.segments import compact as packing

_US = "(extract(epoch FROM {0}) * 1000000)::bigint AS {0}"
_INSTANT = "'epoch'::timestamptz + {0} * interval '1 microsecond'"
_CONTENT = "format, route, exchange, routing_key, to_exchange, to_key, properties, body, key"
_READ = f"SELECT lane, id, {_US.format('due_at')}, {_US.format('parked_at')}, checksum, {_CONTENT} FROM {{}}"
_WRITE = f"""
INSERT INTO message (lane, id, due_at, parked_at, checksum, {_CONTENT})
SELECT lane, id, {_INSTANT.format("due_at")}, {_INSTANT.format("parked_at")}, checksum, {_CONTENT}
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::int[], $7::bytea[], $8::bytea[],
            $9::bytea[], $10::bytea[], $11::bytea[], $12::bytea[], $13::bytea[], $14::bytea[])
     AS new (lane, id, due_at, parked_at, checksum, {_CONTENT})
"""
_KEYS = "INSERT INTO message_key SELECT key, lane, due_at, id FROM message WHERE key IS NOT NULL ON CONFLICT DO NOTHING"
_COUNT = "INSERT INTO counter SELECT $1, $2, $3 ON CONFLICT (lane, kind) DO UPDATE SET n = counter.n + excluded.n"


class Row(NamedTuple):
    """A message's raw row; instants are epoch microseconds."""

    lane: int
    id: int
    due_us: int
    parked_us: int
    checksum: int
    format: int
    route: bytes
    exchange: bytes
    routing_key: bytes
    to_exchange: bytes
    to_key: bytes
    properties: bytes
    body: bytes
    key: bytes | None = None


def row(
    id_: int, due_ms: int, lane: int = 1, body: bytes = b"body", key: bytes | None = None, parked_ms: int = 1_000
) -> Row:
    """An ordinary message, as the daemon would have parked it."""
    exchange, routing_key, properties = b"delayer.in", b"orders.eu", b"\x10\x00\x02"
    checksum = checksum_of(exchange, routing_key, properties, body)
    return Row(
        lane, id_, due_ms * 1000, parked_ms * 1000, checksum, FORMAT, b"delayer.in", exchange, routing_key,
        b"delayer.out", b"orders.eu", properties, body, key,
    )  # fmt: skip


def rows(
    count: int, from_ms: int, *, lane: int = 1, first_id: int = 1, span_ms: int = DAY_MS, seed: int = 1
) -> list[Row]:
    """Messages due at random instants within ``span_ms`` from ``from_ms`` on, in no order. Every fourth has a key."""
    chance = random.Random(seed)
    return [
        row(
            id_, from_ms + chance.randrange(span_ms), lane, b'{"order": %d, "kind": "reminder"}' % (id_ - first_id),
            None if id_ % 4 else b"key %d" % id_,
        )
        for id_ in range(first_id, first_id + count)
    ]  # fmt: skip


async def put(admin: asyncpg.Connection, waiting: Iterable[Row]) -> None:
    """Write rows, with the keys, lanes and counters that belong to them."""
    waiting = list(waiting)
    await admin.execute(_WRITE, *map(list, zip(*waiting, strict=True)))
    await admin.execute(_KEYS)
    for number in {one.lane for one in waiting}:
        await admin.execute("INSERT INTO lane VALUES ($1, 0, 'gone') ON CONFLICT DO NOTHING", number)
        await admin.execute(_COUNT, number, "parked", sum(one.lane == number for one in waiting))
    await admin.execute("SELECT setval('message_id', greatest((SELECT max(id) FROM message), nextval('message_id')))")


async def waiting(admin: asyncpg.Connection) -> dict[int, Row]:
    """The rows of ``message``, by id."""
    return {found["id"]: Row(*found) for found in await admin.fetch(_READ.format("message"))}


async def packed(admin: asyncpg.Connection) -> dict[int, Row]:
    """The live messages in segments, by id; each in one only, which its key names."""
    found: dict[int, Row] = {}
    keys = {}
    for segment in await catalog.list_segments(admin):
        inside = await catalog.read_segment(admin, segment.id)
        assert inside is not None
        table, _ = inside
        columns = [column.cast(pa.timestamp("us", "UTC")).cast("int64") if name.endswith("_at") else column
                   for name, column in zip(table.column_names, table.columns, strict=True)]  # fmt: skip
        for values in zip(*(column.to_pylist() for column in columns), strict=True):
            assert values[0] not in found, f"message {values[0]} is in two segments"
            found[values[0]] = one = Row(segment.lane, *values)
            if one.key is not None:
                keys[one.key] = (one.id, segment.id)
    named = await admin.fetch("SELECT key, id, segment FROM message_key WHERE segment IS NOT NULL")
    assert keys == {key: tuple(place) for key, *place in named}
    return found


async def everything(admin: asyncpg.Connection) -> dict[int, Row]:
    """All messages that wait, by id: each is either a row or in exactly one segment."""
    as_rows, as_segments = await waiting(admin), await packed(admin)
    twice = as_rows.keys() & as_segments.keys()
    assert not twice, f"both row and in a segment: {sorted(twice)[:10]}"
    return as_rows | as_segments


async def conserved(admin: asyncpg.Connection) -> dict[str, int]:
    """Check both laws of conservation, lane by lane and over all; the counters of all lanes together."""
    counters: dict[int, dict[str, int]] = {}
    for number, kind, n in await admin.fetch("SELECT lane, kind, n FROM counter"):
        counters.setdefault(number, {})[kind] = n
    for number, of in counters.items():
        held = await admin.fetchval("SELECT count(*) FROM held WHERE lane = $1", number)
        assert of.get("held", 0) == held, f"lane {number}: {of}, and {held} are held"
        rest = held + await admin.fetchval("SELECT count(*) FROM message WHERE lane = $1", number)
        out = sum(of.get(kind, 0) for kind in ("released", "cancelled", "compacted"))
        assert of.get("parked", 0) + of.get("restored", 0) == out + rest, f"lane {number}: {of}, and {rest} stand there"
    total = {kind: sum(of.get(kind, 0) for of in counters.values()) for kind in KINDS}
    inside = await admin.fetchval("SELECT coalesce(sum(messages), 0) FROM segment")
    assert total["compacted"] - total["restored"] == inside, f"{total}, and {inside} in segments"
    return total


KINDS = ("parked", "restored", "released", "cancelled", "compacted", "held")


async def compact(admin: asyncpg.Connection, after_ms: int = 0, rows: int = packing.ROWS) -> list[packing.Compacted]:
    """Pack everything due after ``after_ms`` into segments."""
    made = []
    for window in await packing.windows(admin, after_ms, rows):
        while (one := await packing.compact_one(admin, window, rows=rows)) is not None:
            made.append(one)
            if not one.more:
                break
    return made


def without_lanes(found: Mapping[int, Row]) -> dict[int, tuple[Any, ...]]:
    """The rows without their lanes: a restore keeps everything but the lane."""
    return {number: one[1:] for number, one in found.items()}
