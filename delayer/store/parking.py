"""Parking: messages into a lane, in one transaction that commits only while the lane is ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import asyncpg

from delayer.core.errors import LaneLost
from delayer.core.hold import Hold
from delayer.core.message import Parcel
from delayer.core.values import KeyGroup, TakenOut
from delayer.faultpoint import reach
from delayer.store import envelope, keys, statements
from delayer.store.retry import pause_ms
from delayer.store.segments import Into

Changes = Counter[tuple[int, str]]
"""What a transaction adds to the counters, by lane and kind."""


async def park_plain(connection: asyncpg.Connection, lane: Into, parcels: Sequence[Parcel]) -> None:
    """Messages without keys: one COPY."""
    number = lane.number
    await connection.copy_records_to_table(
        "message", records=[envelope.row(parcel, number) for parcel in parcels], columns=envelope.COLUMNS
    )
    reach("park.copied")
    await _count(connection, lane, Counter({(number, "parked"): len(parcels)}))


async def park_keyed(
    connection: asyncpg.Connection, lane: Into, parcels: Sequence[Parcel], cancels: Sequence[bytes]
) -> TakenOut:
    """Messages of which some have keys, and keys or groups of keys to cancel. The cancels act before the messages.
    Returns the keys whose waiting messages were taken out.

    Of several messages with one key the last is parked. The earlier ones count as parked and cancelled without being
    written: they came in, and are not coming out.
    """
    number = lane.number
    last = {parcel.key: parcel for parcel in parcels if parcel.key is not None}
    kept = [parcel for parcel in parcels if parcel.key is None or last[parcel.key] is parcel]
    groups = [key for key in cancels if isinstance(key, KeyGroup)]
    named = {key for key in cancels if not isinstance(key, KeyGroup)}
    touched = named | {key for key in last if key is not None} | await keys.of_groups(connection, groups)
    cancelled = await keys.cancel_waiting(connection, touched)
    ids = await _new_ids(connection, len(kept))
    await connection.copy_records_to_table(
        "message",
        records=[(*envelope.row(parcel, number), new) for parcel, new in zip(kept, ids, strict=True)],
        columns=envelope.COLUMNS_WITH_ID,
    )
    pointers = [(p.key, p.due_ms, new) for p, new in zip(kept, ids, strict=True) if p.key is not None]
    await keys.point(connection, number, touched, pointers)
    reach("park.copied")
    changes: Changes = Counter({(number, "parked"): len(parcels), (number, "cancelled"): len(parcels) - len(kept)})
    for of_lane, n in cancelled.messages.items():
        changes[of_lane, "cancelled"] += n
    for of_lane, n in cancelled.held.items():
        changes[of_lane, "held"] -= n
    await _count(connection, lane, changes)
    return TakenOut(frozenset(cancelled.keys), frozenset(cancelled.unsure))


async def hold_new(
    connection: asyncpg.Connection, lane: Into, parcels: Sequence[tuple[Parcel, Hold]], now_ms: int
) -> int | None:
    """Put messages that never waited into held. Returns when the daemon retries the first of them (epoch ms), never
    before it is due; None where a person decides about all of them."""
    number = lane.number
    records = []
    retries = []
    for (parcel, hold), new in zip(parcels, await _new_ids(connection, len(parcels)), strict=True):
        retry_ms = hold.retry_ms(max(now_ms + pause_ms(1, new), parcel.due_ms))
        if retry_ms is not None:
            retries.append(retry_ms)
        records.append(
            (*envelope.row(parcel, number), new, retry_ms, 1, *envelope.hold_row(hold), parcel.token or None)
        )
    await connection.copy_records_to_table("held", records=records, columns=envelope.HELD_COLUMNS)
    reach("park.copied")
    await _count(connection, lane, Counter({(number, "parked"): len(records), (number, "held"): len(records)}))
    return min(retries, default=None)


async def _new_ids(connection: asyncpg.Connection, count: int) -> list[int]:
    rows = await connection.fetch("SELECT nextval('message_id') FROM generate_series(1, $1::int)", count)
    return [row[0] for row in rows]


async def _count(connection: asyncpg.Connection, lane: Into, changes: Changes) -> None:
    """Count, if the lane is still ours; the last statement before the commit."""
    # A park of cancels that met nothing changes no counter, but must be fenced as well.
    changed = sorted((of, kind, n) for (of, kind), n in changes.items() if n) or [(lane.number, "parked", 0)]
    lanes, kinds, numbers = zip(*changed, strict=True)
    counted = await connection.fetch(statements.COUNT_PARKED, lanes, kinds, numbers, lane.number, lane.epoch)
    if not counted:
        raise LaneLost(f"lane {lane.number}: it changed its owner since epoch {lane.epoch}")
