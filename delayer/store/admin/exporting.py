"""Every message of one snapshot of a store, for `delayer export` and `delayer backlog export`. It reads page by page,
as lists do, but in one transaction. So concurrent compactions, restores, reschedules and releases do not matter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from asyncpg import Connection

from delayer.core.filters import Filter
from delayer.store import waiting
from delayer.store.session import LONG_SECONDS, read_connection
from delayer.store.waiting import Entry

PAGE: Final = 1_000
PAGE_BYTES: Final = 16 << 20
"""Maximum bytes of bodies and properties read at once."""
_DAY_US: Final = 86_400_000_000
# The sum does not depend on the order of messages, nor on whether they are rows or in segments.
_DIGESTS: Final = f"""
SELECT floor(due_us / {_DAY_US}.0)::bigint, route, count(*), sum(id * (due_us # (checksum << 16))::numeric)
FROM (SELECT id, (extract(epoch FROM due_at) * 1000000)::bigint AS due_us, checksum, route FROM message) AS waiting
GROUP BY 1, 2
"""
# The first query after this takes the snapshot, which does not cover the catalog. The lock on the parent keeps
# partitions from being dropped. The lock on the default partition keeps its rows from moving into a new one.
_KEEP_PARTITIONS: Final = "LOCK TABLE ONLY message, ONLY message_default IN ACCESS SHARE MODE"
_NO_TIMEOUTS: Final = """
SELECT set_config(name, '0', false) FROM pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""


class BrokenSegments(Exception):
    """Some segments are unreadable. All messages except theirs are exported."""

    def __init__(self, segments: Sequence[int]) -> None:
        super().__init__(f"segments {', '.join(map(str, segments))} are unreadable: see docs/backlog.md")


@asynccontextmanager
async def snapshot(url: str) -> AsyncIterator[Connection]:
    """A connection that reads one snapshot, however slowly. Raises StoreLost, BadStoreUrl, SchemaOutdated."""
    async with read_connection(url, "export") as connection:
        await connection.execute(_NO_TIMEOUTS)
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(_KEEP_PARTITIONS)
            yield connection


async def read_portions(
    connection: Connection, wanted: Filter, page_bytes: int = PAGE_BYTES, *, bodies: bool = True
) -> AsyncIterator[Sequence[Entry]]:
    """Waiting messages of the snapshot, in portions, with empty bodies unless ``bodies``. Raises the driver's errors;
    at the end BrokenSegments, if any."""
    broken: set[int] = set()
    async for page in waiting.pages(connection, wanted, PAGE, bodies=bodies):
        broken |= set(page.broken)
        if not bodies:
            yield page.messages
            continue
        for portion in _portions(page.messages, page_bytes):
            yield await waiting.with_bodies(connection, portion)
    if broken:
        raise BrokenSegments(sorted(broken))


def _portions(messages: Sequence[Entry], page_bytes: int) -> list[list[Entry]]:
    """Split ``messages`` into runs of at most ``page_bytes`` of bodies and properties, or of a single message."""
    portions: list[list[Entry]] = []
    room = 0
    for one in messages:
        size = one.size + len(one.properties)
        if room < size or not portions:
            portions.append([])
            room = page_bytes
        portions[-1].append(one)
        room -= size
    return portions


class Digest(NamedTuple):
    """A number of messages, and a sum over them that changes with their ids, instants and checksums."""

    messages: int
    total: int

    def __add__(self, other: Digest) -> Digest:  # type: ignore[override]
        return Digest(self.messages + other.messages, self.total + other.total)


async def digests(connection: Connection) -> tuple[dict[tuple[int, bytes], Digest], list[int]]:
    """A digest of the waiting messages of each due day (since 1970) and route, and the unreadable segments. Reads every
    row once. Raises the driver's errors."""
    await connection.execute("SET LOCAL statement_timeout = 0; SET LOCAL enable_seqscan = on")
    rows = await connection.fetch(_DIGESTS, timeout=LONG_SECONDS)
    await connection.execute("SET LOCAL enable_seqscan = off")
    found = {(day, route): Digest(messages, int(total)) for day, route, messages, total in rows}
    broken = []
    async for segment, messages in waiting.unpack_all(connection):
        if messages is None:
            broken.append(segment)
        for one in messages or ():
            due_us = one.place.due_us
            digest = Digest(1, one.place.id * (due_us ^ (one.checksum << 16)))
            among = due_us // _DAY_US, one.route
            found[among] = found.get(among, Digest(0, 0)) + digest
    return found, broken
