"""Releases one lane: it claims due rows, publishes them, and commits their deletion when every confirm is here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from delayer.amqp import edits
from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties
from delayer.broker.ports import Heartbeat, Lane, Live, Publisher
from delayer.broker.retry import Retry
from delayer.core.counters import Counters
from delayer.core.errors import BrokerLost, LaneLost, StoreLost
from delayer.core.faultpoint import reach
from delayer.core.hold import Hold, Limits, hold_for, too_late, unfit
from delayer.core.message import SHORT_STRING, Confirmed, Due, Outgoing
from delayer.core.rate_limit import TokenBucket

log = structlog.get_logger(__name__)

SLICE: Final = 1.0
"""Longest single sleep, in seconds. After each one the loop notices a stop and feeds the watchdog."""

COALESCE_SECONDS: Final = 0.002
"""Seconds between a claim that took all due rows and the next one. Rows that become due meanwhile share a transaction,
a write and a confirm. Without this rest a daemon at 5,000 messages a second makes a turn for every dozen of them. Every
message is later by it."""

BEHIND: Final = 2.0
"""Seconds after which a lane that has not taken all due rows counts as behind. A broker that begins a new log file
confirms nothing for almost one second."""


@dataclass(frozen=True, slots=True)
class Portion:
    """The bounds of one claim. It must be confirmed well within the deadline. It must also cross a slow line to the
    store before the server ends an idle transaction (4 s). A claim takes at least one message, however large. So a lane
    has at most ``body_bytes`` and one message in memory."""

    messages: int = 1000
    body_bytes: int = 256 << 10


PORTION: Final = Portion()


class Release:
    """The release loop of one lane."""

    def __init__(
        self,
        lane: Lane,
        publisher: Publisher,
        live: Live,
        *,
        heartbeat: Heartbeat,
        counters: Counters,
        portion: Portion = PORTION,
    ) -> None:
        self._bucket: TokenBucket | None = None
        self._live = live
        self._lane = lane
        self._publisher = publisher
        self._portion = portion
        self._loop = f"lane {lane.number}"
        self._heartbeat = heartbeat
        self._counters = counters
        self.leaving = False
        self._busy_since: float | None = None

    @property
    def behind(self) -> bool:
        """Whether this lane does not keep up: it has been in one turn, or in full ones without a rest, for too long."""
        return self._busy_since is not None and time.monotonic() - self._busy_since > BEHIND

    def leave(self) -> None:
        """End this loop alone, after its tick and within a slice of its rest or pause, and let go of the lane."""
        self.leaving = True

    def _over(self, stopping: asyncio.Event) -> bool:
        return self.leaving or stopping.is_set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Tick until stopping is set, this loop is told to leave, or the lane is lost; then let go of the lane."""
        beat = partial(self._heartbeat.beat, self._loop)
        retry = Retry(stopping, beat, lambda: self.leaving)
        try:
            while not self._over(stopping):
                beat()
                if not self._publisher.ready:
                    # A claim now would only keep a transaction open until its idle timeout ends it.
                    await retry.wait(SLICE)
                    continue
                seconds: float | None = None
                self._busy_since = self._busy_since or time.monotonic()
                try:
                    seconds = await self.tick()
                except BrokerLost as lost:
                    log.warning("release interrupted", lane=self._lane.number, reason=str(lost))
                if seconds is None:
                    await retry.pause()
                    continue
                retry.succeeded()
                if seconds > 0:
                    self._busy_since = None
                await self._rest(seconds, beat, stopping)
        except LaneLost as lost:
            log.warning("lane lost", lane=self._lane.number, reason=str(lost))
        except StoreLost as lost:
            log.warning("lane given up", lane=self._lane.number, reason=str(lost))
        finally:
            self._heartbeat.forget(self._loop)
            try:
                await self._lane.release()
            finally:
                await self._publisher.close()

    async def tick(self) -> float:
        """Do everything that is due, one portion of it; return the seconds until there may be more to do.

        Raises BrokerLost (the rows are back), LaneLost, StoreLost.
        """
        limit = min(self._portion.messages, self._publisher.batch_limit)
        rate, now = self._live.rate(self._lane.route), time.monotonic()
        if rate is None:
            self._bucket = None
            claimed = await self._claim_and_send(limit)
            return (0.0 if self._lane.more else COALESCE_SECONDS) if claimed else await self._lane.sleep_hint()
        if self._bucket is None or self._bucket.rate != rate:
            self._bucket = TokenBucket(rate, now)
        if (wait := self._bucket.wait(now)) > 0:
            return await self._throttled(wait)
        tokens = self._bucket.take(limit, now)
        claimed = await self._claim_and_send(tokens)
        self._bucket.give_back(tokens - claimed)
        if not claimed and not self._lane.more:
            return await self._lane.sleep_hint()
        return await self._throttled(max(self._bucket.wait(time.monotonic()), COALESCE_SECONDS))

    async def _throttled(self, seconds: float) -> float:
        """Rest until there are tokens."""
        await asyncio.sleep(min(seconds, SLICE))
        if not self._lane.held_by_us:
            raise LaneLost(f"lane {self._lane.number}: the connection that holds its lock is gone")
        return 0.0

    async def _claim_and_send(self, limit: int) -> int:
        """Claim, publish, settle; how many were claimed."""
        began = time.perf_counter()
        rows = await self._lane.claim(limit, self._portion.body_bytes)
        claimed = time.perf_counter()
        if not rows:
            await self._lane.settle([], [])
            return 0
        try:
            released, held = await self._send(rows)
        except BaseException:
            # No message of this portion is known to be published, so the rows go back, after a cancellation as well.
            await self._lane.give_up()
            raise
        out_ms, sent = self._live.now_lower_ms(), time.perf_counter()
        await self._lane.settle(released, held)
        self._counters.add("released", len(released))
        self._counters.batch("claim", len(rows))
        self._counters.took("claim", claimed - began)
        self._counters.took("publish", sent - claimed)
        self._counters.took("settle", time.perf_counter() - sent)
        self._counters.add_routes("released", [row.parcel.route for row in released])
        # Without messages that were held: their destination delayed them, not the daemon.
        self._counters.delivered([(row.due_ms, row.parcel.route) for row in released if not row.attempts], out_ms)
        self._report(held)
        return len(rows)

    async def _rest(self, seconds: float, beat: Callable[[], None], stopping: asyncio.Event) -> None:
        """Sleep for ``seconds``, or until the lane is woken, in slices: each one feeds the watchdog."""
        deadline = time.monotonic() + seconds
        while not self._over(stopping) and (left := deadline - time.monotonic()) > 0:
            beat()
            slice_ = min(left, SLICE)
            began = time.monotonic()
            await self._lane.wait(slice_)
            if time.monotonic() - began < slice_:
                return  # A row was parked that is due by now, or the lane is lost.

    async def _send(self, rows: Sequence[Due]) -> tuple[list[Due], list[tuple[Due, Hold]]]:
        sendable: list[Due] = []
        batch: list[Outgoing] = []
        held: list[tuple[Due, Hold]] = []
        rows, too_late = sorted_out(rows, self._live.late_limits(), self._live.now_lower_ms())
        held += too_late
        for row in rows:
            outgoing = prepared(row, self._publisher.max_properties)
            if isinstance(outgoing, Hold):
                held.append((row, outgoing))
            else:
                sendable.append(row)
                batch.append(outgoing)
        outcomes = await self._publisher.publish(batch)
        reach("release.published")
        released: list[Due] = []
        for row, outcome in zip(sendable, outcomes, strict=True):
            if isinstance(outcome, Confirmed):
                released.append(row)
            else:
                self._counters.objected(outcome, row.parcel.route)
                held.append((row, hold_for(outcome)))
        return released, [(row, hold.after(row.hold)) for row, hold in held]

    def _report(self, held: Sequence[tuple[Due, Hold]]) -> None:
        for row, hold in held:
            if row.attempts == 0:
                self._counters.add("held", 1)
                self._counters.add_routes("held", [row.parcel.route])
            log.warning(
                "message held",
                id=row.id,
                kind=hold.kind,
                reason=hold.text,
                attempts=row.attempts + 1,
                exchange=row.parcel.target.exchange,
                routing_key=row.parcel.target.routing_key,
                route=row.parcel.route,
            )


def sorted_out(rows: Sequence[Due], limits: Limits, now_ms: int) -> tuple[Sequence[Due], list[tuple[Due, Hold]]]:
    """The rows to publish, and the rows that are too late for their route. Pure.

    A message that waited for a person is claimed again only after an operator retried it, so deliver it."""
    if not limits:
        return rows, []
    on_time: list[Due] = []
    late: list[tuple[Due, Hold]] = []
    for row in rows:
        by_hand = row.hold is not None and row.hold.for_a_person
        hold = None if by_hand else too_late(row.due_ms, now_ms, limits.get(row.parcel.route))
        if hold is None:
            on_time.append(row)
        else:
            late.append((row, hold))
    return on_time, late


def prepared(row: Due, max_properties: int) -> Outgoing | Hold:
    """The message as it leaves, or the Hold of a message that cannot be published as it stands."""
    if not row.sound:
        return unfit("the stored bytes do not fit their checksum, or a newer delayer wrote their format")
    token = row.parcel.token or b"%d" % row.id
    try:
        properties = edits.released(Properties.parse(row.parcel.properties), token, row.due_ms)
    except (MalformedProperties, MalformedTable) as broken:
        return unfit(f"malformed properties: {broken}")
    if len(properties) > max_properties:
        return unfit(f"the properties are too long: expected at most {max_properties} bytes, found {len(properties)}")
    target = row.parcel.target
    if (longest := max(len(target.exchange), len(target.routing_key))) > SHORT_STRING:
        return unfit(f"the destination is too long: expected at most {SHORT_STRING} bytes, found {longest}")
    isolated = row.hold is not None and row.hold.isolated
    return Outgoing(target.exchange, target.routing_key, properties, row.parcel.body, token, isolated)
