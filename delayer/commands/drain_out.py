"""Rows of the store into the cascade, for delayer drain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import asyncpg

from delayer.broker.admin import Admin
from delayer.broker.publisher import RelayPublisher
from delayer.commands.drain_relay import NAME, PORTION, relay_of
from delayer.commands.options import whoami
from delayer.commands.output import Progress
from delayer.core.errors import BrokerLost
from delayer.core.filters import Filter
from delayer.core.message import Confirmed, Due
from delayer.services import draining as rules
from delayer.settings import Settings
from delayer.store import acting, acts, draining, listing
from delayer.wiring import cascade_of, native_of

MARGIN_MS: Final = 60_000
"""What is due sooner is left to the daemon, which is about to release it."""


class Moved(NamedTuple):
    """How many were moved, and how many rows stay because their bytes do not fit their checksum."""

    messages: int
    unsound: int = 0


async def standing(url: str, *, keys_too: bool) -> draining.Standing:
    """What waits in the store."""
    async with listing.looking(url, "count what waits") as connection:
        now_ms = await connection.fetchval("SELECT now()")
        return await draining.standing(connection, now_ms + MARGIN_MS, keys_too=keys_too)


async def rows_to_cascade(settings: Settings, url: str, *, keys_too: bool) -> Moved:
    """Each portion is confirmed by the cascade before it leaves the store. Raises BrokerLost where it is not."""
    async with await Admin.connect(settings.broker_url, name=NAME) as admin:
        await admin.declare(native_of(settings))
    async with relay_of(settings) as relay, acting.acting(url, "drain") as connection:
        publisher = RelayPublisher(relay)
        act = await acts.begin(connection, whoami(), "drain to native", {"keys_too": True} if keys_too else {})
        try:
            return await _portions_out(connection, publisher, settings, act, keys_too=keys_too)
        finally:
            await publisher.close()


async def _portions_out(
    connection: asyncpg.Connection, publisher: RelayPublisher, settings: Settings, act: int, *, keys_too: bool
) -> Moved:
    progress, done = Progress(), 0
    left: set[int] = set()
    now_ms = await connection.fetchval("SELECT now()")
    wanted = Filter(due_from_ms=now_ms + MARGIN_MS)
    after: tuple[int, int] | None = listing.BEGINNING
    while after is not None:
        found = await listing.find(connection, wanted, None, PORTION, after)
        places = [place for place in found.places if place.segment is None]
        while places:
            try:
                async with draining.taken(connection, places, act, keys_too=keys_too) as rows:
                    await _publish(connection, rows, publisher, settings)
                    done += len(rows)
                break
            except draining.Unsound as unsound:
                left |= unsound.ids
                places = [place for place in places if place.id not in left]
        progress(done)
        after = found.after
    return Moved(done, len(left))


async def _publish(
    connection: asyncpg.Connection, rows: Sequence[Due], publisher: RelayPublisher, settings: Settings
) -> None:
    now_ms = await connection.fetchval("SELECT clock_timestamp()")
    queue, levels = settings.native.due_queue.encode(), cascade_of(settings)
    outcomes = await publisher.publish([rules.into_cascade(row, levels, queue, now_ms) for row in rows])
    refused = [outcome for outcome in outcomes if not isinstance(outcome, Confirmed)]
    if refused:
        raise BrokerLost(f"the cascade did not take {len(refused)} of {len(rows)} messages: {refused[0]}; they stay")
