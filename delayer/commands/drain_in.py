"""Levels of the cascade into the store, for delayer drain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from delayer.broker.brief import briefly
from delayer.broker.consumer import RelayConsumer
from delayer.broker.errors import BrokerRefused
from delayer.broker.relay import Relay
from delayer.commands.drain_relay import NAME, PORTION, relay_of
from delayer.commands.options import whoami
from delayer.commands.output import Progress
from delayer.core.cascade import LEVELS, Cascade
from delayer.faultpoint import reach
from delayer.services import draining as rules
from delayer.services.draining import Left
from delayer.settings import Settings
from delayer.store import acting, acts
from delayer.store.postgres import PostgresStore

LOWEST: Final = 5
"""The lowest level that is emptied, of 32 seconds: what stands below comes out before anybody is done here."""
PATIENCE: Final = 2
"""Seconds without a message after which a level counts as empty: what was there is gone, or in other hands."""


class Around(NamedTuple):
    """Depths in the broker: of the levels by number, of the due queue, of the strays. What is missing has none."""

    levels: dict[int, int]
    due: int
    strays: int


async def look_around(settings: Settings, levels: Cascade) -> Around:
    """What stands there. Raises BrokerLost, BrokerRefused."""
    due = settings.native.due_queue
    async with briefly(settings.broker_url, NAME) as broker:
        seen = await broker.picture(levels, [due])
    if seen.hidden:
        # What is not shown must not count as nothing: whoever drains removes the cascade next.
        raise BrokerRefused(f"queue {seen.hidden[0]!r} of the cascade is hidden from this user")
    depths = {name: depth or 0 for name, depth in seen.queues.items()}
    return Around({one.level: one.depth or 0 for one in seen.levels}, depths[due], depths.get(levels.strays or "", 0))


def left_of(around: Around) -> list[Left]:
    """What of that does not go into the store, and why."""
    return rules.left_in_cascade(around.levels, around.due, around.strays, LOWEST)


async def levels_to_store(settings: Settings, url: str, levels: Cascade) -> int:
    """How many were moved."""
    store = await PostgresStore.connect(url)
    done = 0
    try:
        (lane,) = await store.own_lanes(1)
        try:
            async with acting.acting(url, "drain") as connection, relay_of(settings) as relay:
                act = await acts.begin(connection, whoami(), "drain to store", {})
                # From the top: what goes down meanwhile is met again below.
                for level in reversed(range(LOWEST, LEVELS)):
                    if not (await look_around(settings, levels)).levels[level]:
                        continue
                    due_queue = settings.native.due_queue.encode()
                    async for moved in _portions_in(store, lane, relay, levels, level, due_queue=due_queue):
                        await acts.add(connection, act, moved)
                        done += moved
                        Progress()(done)
        finally:
            await lane.release()
    finally:
        await store.close()
    return done


async def _portions_in(
    store: PostgresStore, lane: object, relay: Relay, levels: Cascade, level: int, *, due_queue: bytes
) -> AsyncIterator[int]:
    """Park what stands in one level, portion by portion; each is acknowledged when it is committed."""
    connection = await relay.connection(10.0)
    subscription = await RelayConsumer(relay).subscribe(levels.level(level), PORTION)
    try:
        empty = 0
        while empty < PATIENCE:
            batch = await subscription.next_batch(PORTION, 0.02)
            empty = 0 if batch else empty + 1
            if batch:
                now_ms = store.now_ms()
                most = connection.frame_max - 20
                parcels = [
                    rules.into_store(one, levels, level, now_ms, due_queue=due_queue, max_properties=most)
                    for one in batch
                ]
                reach("drain.read")
                await store.park(lane, parcels, [])
                reach("drain.parked")
                subscription.ack(batch[-1].tag, multiple=True)
                reach("drain.acked")
                yield len(batch)
    finally:
        await subscription.close()
