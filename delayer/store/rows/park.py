"""Parking: messages into lanes, in one transaction.

A park into a lane of this process commits only while the lane is ours. A message of a limited route goes into the lane
of its route, whichever process owns that; its owner is notified when the transaction commits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import asyncpg

from delayer.core.backoff import pause_ms
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold
from delayer.core.message import KeyGroup, Parcel
from delayer.store import statements
from delayer.store.lanes.notify import notify
from delayer.store.rows import envelope, keys

Changes = Counter[tuple[int, str]]
"""What a transaction adds to the counters, by lane and kind."""


class Placement(NamedTuple):
    """The lanes that the rows of one transaction go into."""

    number: int
    """The lane of messages whose route has no lane."""
    routes: Mapping[bytes, int]
    """The lanes of limited routes."""
    epoch: int | None = None
    """Of lane ``number``, which this process owns; None if it owns no lane."""

    def of(self, parcel: Parcel) -> int:
        return self.routes.get(parcel.route, self.number)

    def others(self, dues: Iterable[tuple[Parcel, int]]) -> dict[int, int]:
        """The lanes to notify, with their soonest instant."""
        soonest: dict[int, int] = {}
        for parcel, at_ms in dues:
            if self.epoch is None or parcel.route in self.routes:
                number = self.of(parcel)
                soonest[number] = min(at_ms, soonest.get(number, at_ms))
        return soonest


async def anywhere(connection: asyncpg.Connection, turn: int) -> Placement:
    """The next of the lanes without a route, and the lanes of routes, for a process that owns none. Raises StoreLost,
    the driver's errors."""
    rows = await connection.fetch("SELECT number, route FROM lane ORDER BY number")
    numbers = [number for number, route in rows if route is None]
    if not numbers:
        raise StoreLost("the store has no lanes", "run `delayer db upgrade`")
    return Placement(numbers[turn % len(numbers)], {route: number for number, route in rows if route is not None})


async def park_plain(connection: asyncpg.Connection, place: Placement, parcels: Sequence[Parcel]) -> None:
    """Messages without keys: one COPY."""
    lanes = [place.of(parcel) for parcel in parcels]
    records = [envelope.row(parcel, lane) for parcel, lane in zip(parcels, lanes, strict=True)]
    await connection.copy_records_to_table("message", records=records, columns=envelope.COLUMNS)
    reach("park.copied")
    await notify(connection, place.others((parcel, parcel.due_ms) for parcel in parcels), {})
    await _count(connection, place, Counter((lane, "parked") for lane in lanes))


async def park_keyed(
    connection: asyncpg.Connection, place: Placement, parcels: Sequence[Parcel], cancels: Sequence[bytes]
) -> frozenset[bytes]:
    """Messages of which some have keys, and keys or groups of keys to cancel. The cancels act before the messages.
    Returns the keys whose waiting messages were taken out.

    Of several messages with one key the last is parked. The earlier ones count as parked and cancelled without being
    written: they came in, and are not coming out.
    """
    last = {parcel.key: parcel for parcel in parcels if parcel.key is not None}
    kept = [parcel for parcel in parcels if parcel.key is None or last[parcel.key] is parcel]
    groups = [key for key in cancels if isinstance(key, KeyGroup)]
    named = {key for key in cancels if not isinstance(key, KeyGroup)}
    touched = named | {key for key in last if key is not None} | await keys.of_groups(connection, groups)
    cancelled = await keys.cancel_waiting(connection, touched)
    ids = await _new_ids(connection, len(kept))
    await connection.copy_records_to_table(
        "message",
        records=[(*envelope.row(parcel, place.of(parcel)), new) for parcel, new in zip(kept, ids, strict=True)],
        columns=envelope.COLUMNS_WITH_ID,
    )
    pointers = [(p.key, place.of(p), p.due_ms, new) for p, new in zip(kept, ids, strict=True) if p.key is not None]
    await keys.point(connection, touched, pointers)
    reach("park.copied")
    await notify(connection, place.others((parcel, parcel.due_ms) for parcel in kept), {})
    changes: Changes = Counter((place.of(parcel), "parked") for parcel in parcels)
    changes.update((place.of(parcel), "cancelled") for parcel in parcels)
    changes.subtract((place.of(parcel), "cancelled") for parcel in kept)
    for of_lane, n in cancelled.messages.items():
        changes[of_lane, "cancelled"] += n
    for of_lane, n in cancelled.held.items():
        changes[of_lane, "held"] -= n
    await _count(connection, place, changes)
    return frozenset(cancelled.keys)


async def hold_new(
    connection: asyncpg.Connection, place: Placement, parcels: Sequence[tuple[Parcel, Hold]], now_ms: int
) -> int | None:
    """Put messages that never waited into held. Returns when the daemon retries the first of them (epoch ms), never
    before it is due; None where a person decides about all of them."""
    records: list[tuple[object, ...]] = []
    retries: list[tuple[Parcel, int]] = []
    changes: Changes = Counter()
    for (parcel, hold), new in zip(parcels, await _new_ids(connection, len(parcels)), strict=True):
        lane, retry_ms = place.of(parcel), hold.retry_ms(max(now_ms + pause_ms(1, new), parcel.due_ms))
        if retry_ms is not None:
            retries.append((parcel, retry_ms))
        records.append((*envelope.row(parcel, lane), new, retry_ms, 1, *envelope.hold_row(hold), parcel.token or None))
        changes.update([(lane, "parked"), (lane, "held")])
    await connection.copy_records_to_table("held", records=records, columns=envelope.HELD_COLUMNS)
    reach("park.copied")
    await notify(connection, {}, place.others(retries))
    await _count(connection, place, changes)
    return min((retry_ms for _, retry_ms in retries), default=None)


async def _new_ids(connection: asyncpg.Connection, count: int) -> list[int]:
    rows = await connection.fetch("SELECT nextval('message_id') FROM generate_series(1, $1::int)", count)
    return [row[0] for row in rows]


async def _count(connection: asyncpg.Connection, place: Placement, changes: Changes) -> None:
    """Count, if the lane is still ours; the last statement before the commit."""
    # A park of cancels that met nothing changes no counter, but must be fenced as well.
    changed = sorted((of, kind, n) for (of, kind), n in changes.items() if n) or [(place.number, "parked", 0)]
    lanes, kinds, numbers = zip(*changed, strict=True)
    if place.epoch is None:
        await connection.execute(statements.COUNT, lanes, kinds, numbers)
    elif not await connection.fetch(statements.COUNT_PARKED, lanes, kinds, numbers, place.number, place.epoch):
        raise LaneLost(f"lane {place.number}: it changed its owner since epoch {place.epoch}")
