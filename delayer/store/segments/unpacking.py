"""What is packed in a segment, read back: its live messages, or why it does not say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from delayer.store import pool
from delayer.store.errors import DAMAGED, describe
from delayer.store.segments import damaged

_READ = "SELECT id, messages, cancelled, format, digest FROM segment WHERE id = $1"


async def bytes_of(connection: asyncpg.Connection, segment: int) -> bytes | None:
    """The packed bytes; None when the segment is gone. Raises SegmentBroken where the store itself cannot read
    them, and the driver's errors."""
    from delayer.store.segments.codec import SegmentBroken  # noqa: PLC0415 - pyarrow

    try:
        async with pool.transaction(connection):  # a savepoint: the damage ends what is inside, and no more
            packed: bytes | None = await connection.fetchval("SELECT packed FROM segment WHERE id = $1", segment)
    except DAMAGED as error:
        raise SegmentBroken(f"the store cannot read its bytes: {describe(error)}") from error
    return packed


def unpacked(segment: Mapping[str, Any], cancelled: Sequence[int]) -> Any:
    """The live messages of a row of ``segment``, as a table of packing.SCHEMA sorted by (due_at, id).

    Raises SegmentBroken, also when those that were cancelled are not the ones that its row counts.
    """
    from delayer.store.segments import codec  # noqa: PLC0415 - pyarrow

    table = codec.unpack(segment["packed"], segment["format"], segment["messages"], segment["digest"])
    table = codec.without(table, cancelled)
    expected = segment["messages"] - segment["cancelled"]
    if len(table) != expected:
        raise codec.SegmentBroken(f"expected {expected} messages without the cancelled ones, found {len(table)}")
    return table


async def read(connection: asyncpg.Connection, segment: int) -> Any | None:
    """The live messages of the segment of this id (see :func:`unpacked`), for whoever lists them; None if it is gone.
    Decoding is done in a thread: the page asks too, and its daemon has messages to release meanwhile.

    Raises SegmentBroken, and the driver's errors.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_READ, segment)
        if row is None:
            return None
        whole = dict(row) | {"packed": await bytes_of(connection, segment)}
        return await asyncio.to_thread(unpacked, whole, await _cancelled(connection, row))


async def live(connection: asyncpg.Connection, segment: asyncpg.Record) -> Any:
    """The live messages (see :func:`unpacked`) of a segment whose row the open transaction has locked, whether it was
    read with its bytes or not. Decoding is done in a thread. Raises SegmentBroken, and the driver's errors."""
    whole = dict(segment) | {"packed": await bytes_of(connection, segment["id"])}
    return await asyncio.to_thread(unpacked, whole, await _cancelled(connection, segment))


async def _cancelled(connection: asyncpg.Connection, segment: Mapping[str, Any]) -> list[int]:
    """Which messages of a row of ``segment`` were cancelled. Raises SegmentBroken where the store itself cannot read
    that, and the driver's errors."""
    from delayer.store.segments.codec import SegmentBroken  # noqa: PLC0415 - pyarrow

    try:
        async with pool.transaction(connection):  # a savepoint, as for its bytes
            rows = await connection.fetch("SELECT id FROM segment_cancelled WHERE segment = $1", segment["id"])
    except DAMAGED as error:
        if not segment["cancelled"]:
            return []  # whoever cancels counts it in the segment's row, in the same transaction
        what = await damaged.said(connection, error)
        raise SegmentBroken(f"the store cannot read which of its messages were cancelled: {what}") from error
    return [number for (number,) in rows]
