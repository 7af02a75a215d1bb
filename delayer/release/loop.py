"""The release of one lane, which publishes rows when they are due. A claim deletes rows up to WINDOW_MS early, in a
transaction that stays open while they are published. Once the broker has answered for all of them, its commit also
holds those that were not confirmed. A rollback brings all of them back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final

import structlog

from delayer.amqp.errors import BrokerLost, MalformedProperties, MalformedTable
from delayer.amqp.properties import Properties
from delayer.amqp.values import SHORT_STRING, Confirmed, Outgoing, Pace
from delayer.core.backoff import pause
from delayer.core.counters import Counters
from delayer.core.errors import LaneLost, StoreLost
from delayer.core.faultpoint import reach
from delayer.core.heartbeat import Heartbeat
from delayer.core.hold import Hold, Outcome, too_late, unfit
from delayer.core.message import Due
from delayer.core.publisher import Isolated, Publisher
from delayer.core.rate_limit import TokenBucket
from delayer.format.release import Unpublishable, released_properties
from delayer.held import report_held
from delayer.release.ports import Claimer, Lane, Releases, ReleaseSettings
from delayer.retry import Backoff, Pause, raise_first, take_failures

log = structlog.get_logger(__name__)

SLICE_SECONDS: Final = 1.0
"""Longest single sleep. After each, the loop checks for a stop and feeds the watchdog."""

CLAIM_MESSAGES: Final = 1000
CLAIM_BYTES: Final = 512 << 10
"""Limits of one claim. The broker must confirm all of it well within the publisher's deadline, and the store must send
it within 4 s, even over a slow line, before the server ends an idle transaction. A claim takes at least one message of
any size, but one claim of the process at a time takes a message that exceeds CLAIM_BYTES by a megabyte."""

MOST_CONFIRMED: Final = 20 * CLAIM_MESSAGES
"""More than the open claims of a process with its usual lanes."""

Release = tuple[int, int, int]
"""A row's id, due instant and attempts: a message that an operator reschedules or retries is another release."""


@dataclass(eq=False)
class LaneRelease:
    """Releases one lane, with a task for each of its two claimers: one publishes and settles while the other claims."""

    lane: Lane
    publisher: Publisher
    live: ReleaseSettings
    heartbeat: Heartbeat
    counters: Counters
    confirmed: dict[Release, None] = field(default_factory=dict)
    """Published, and not settled: the store failed, or ended the lane. Shared by the lanes of the process, which may
    own the lane again."""

    def __post_init__(self) -> None:
        self._bucket: TokenBucket | None = None
        self._beat = partial(self.heartbeat.beat, f"lane {self.lane.number}")
        self._turn = asyncio.Lock()
        self._written = asyncio.Event()  # Set once the latest claim is written to the broker.
        self._written.set()

    async def run(self, stopping: asyncio.Event, pause: Pause = pause) -> None:
        """Release until stopping is set, or the lane is lost or to be left; then close the lane. A task that lost the
        broker sleeps for ``pause`` before it claims again."""
        tasks = {asyncio.create_task(self._run_claimer(claimer, stopping, pause)) for claimer in self.lane.claimers}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.lane.leave()
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.heartbeat.forget(f"lane {self.lane.number}")
            failures = take_failures(tasks)
            try:
                await self.lane.close()
            finally:
                if self.lane.route is None:  # Limited routes share a publisher.
                    await self.publisher.close()
        for failure in failures[:1]:  # The second task usually fails for the same reason.
            if isinstance(failure, LaneLost) and self.lane.route is not None:
                log.debug("lane lost", lane=self.lane.number, reason=str(failure))  # The store logs the reason once.
            elif isinstance(failure, LaneLost):
                log.warning("lane lost", lane=self.lane.number, reason=str(failure))
            elif isinstance(failure, StoreLost):
                log.warning("lane given up", lane=self.lane.number, reason=str(failure))
        raise_first(failures, unless=(LaneLost, StoreLost))

    async def _run_claimer(self, claimer: Claimer, stopping: asyncio.Event, pause: Pause) -> None:
        """Claim, publish and settle with one claimer. The task that is claiming feeds the watchdog; publishing and
        settling have deadlines. Raises LaneLost, and a StoreLost without advice."""
        retry, failed = Backoff(self._beat, stopping, self.lane.leaving, pause=pause), False
        while not (self.lane.leaving.is_set() or stopping.is_set()):
            try:
                async with self._turn:
                    if failed:
                        await retry.pause()
                    rows = await self._next_claim(claimer, retry, stopping)
                    if not rows:
                        return
                    before = self._written
                    written = self._written = asyncio.Event()
                await self._publish_and_settle(claimer, rows, before, written)
            except BrokerLost as lost:
                log.warning("release interrupted", lane=self.lane.number, reason=str(lost))
                failed = True
            except StoreLost as lost:
                if not (lost.advice or lost.conflict):
                    raise
                # Another process would fail the same way until an operator acts. After a conflict it would also publish
                # again what the broker has confirmed to this one. So it keeps the lane, and tries again.
                log.warning("release interrupted", lane=self.lane.number, reason=str(lost), next_step=lost.advice)
                failed = True
            else:
                failed = False
                retry.succeeded()
            rows = []  # The next claim may take long, and a large message would stay in memory.

    async def _next_claim(self, claimer: Claimer, retry: Backoff, stopping: asyncio.Event) -> list[Due]:
        """Wait for rows and claim them. An empty list means that this release is over. Raises LaneLost, StoreLost."""
        while not (self.lane.leaving.is_set() or stopping.is_set()):
            self._beat()
            if not self.publisher.ready:
                # A claim now would only keep a transaction open until its idle timeout.
                await retry.wait(SLICE_SECONDS)
                continue
            if (seconds := self.lane.sleep_hint()) > 0:
                await self.lane.wait(min(seconds, SLICE_SECONDS))
                continue
            if rows := await self._claim(claimer):
                return rows
        return []

    async def _claim(self, claimer: Claimer) -> list[Due]:
        """Claim rows, at most one per token of a limited route. Without a token, sleep and return none."""
        limit = min(CLAIM_MESSAGES, self.publisher.batch_limit)
        route, now = self.lane.route, time.monotonic()
        rate = None if route is None else self.live.rates.get(route)
        if rate is None:
            self._bucket = None
        elif self._bucket is None or self._bucket.rate != rate:
            self._bucket = TokenBucket(rate, now)
        bucket = self._bucket
        if bucket is not None:
            if (wait := bucket.wait(now)) > 0:
                await asyncio.sleep(min(wait, SLICE_SECONDS))
                return []
            limit = bucket.take(limit, now)
        rows: list[Due] | None = None
        try:
            rows = await claimer.claim(limit, CLAIM_BYTES)
        finally:
            if rows != []:  # Even if it failed: that may have taken longest.
                self.counters.took("claim", time.monotonic() - now)
        if bucket is not None:
            bucket.give_back(limit - len(rows))
            bucket.waited(time.monotonic() - now, time.monotonic())
        if rows:
            self.counters.batch("claim", len(rows))
        return rows

    async def _publish_and_settle(
        self, claimer: Claimer, rows: Sequence[Due], before: asyncio.Event, written: asyncio.Event
    ) -> None:
        """Publish each message when due, but not before the previous claim is written (``before``); then settle."""
        try:
            done = [row for row in rows if _release_of(row) in self.confirmed] if self.confirmed else []
            if done:
                rows = [row for row in rows if _release_of(row) not in self.confirmed]
            sendable, batch, held = self._prepare_batch(rows)
            pace = Pace([row.due_ms for row in sendable], self.live.now_lower_ms, written.set)
            await before.wait()
            try:
                outcomes = [*await self.publisher.publish(batch, pace), *[Confirmed()] * len(done)]
            finally:
                self.counters.took_to_confirm(pace)
            sendable += done
            reach("release.published")
            now_ms = self.live.now_lower_ms()
            released = [row for row, outcome in zip(sendable, outcomes, strict=True) if isinstance(outcome, Confirmed)]
            held += [(row, one) for row, one in zip(sendable, outcomes, strict=True) if not isinstance(one, Confirmed)]
            held = [(row, hold.after(row.hold)) for row, hold in held]
        except BaseException:
            # Return all rows to the store, even after a cancellation, so confirmed messages are published twice.
            # Settling only some rows would need a second transaction.
            await claimer.give_up()
            raise
        finally:
            written.set()
        began = time.monotonic()
        try:
            await claimer.settle(released, held, partial(_written_times, outcomes, pace, now_ms))
        except StoreLost:
            # The next claim that has these rows settles them without another publish. Another process may have settled
            # the older ones, so they do not stay forever.
            self.confirmed.update(dict.fromkeys(map(_release_of, released)))
            for oldest in list(self.confirmed)[:-MOST_CONFIRMED]:
                del self.confirmed[oldest]
            raise
        finally:
            self.counters.took("settle", time.monotonic() - began)
        for row in done:
            self.confirmed.pop(_release_of(row), None)
        messages = [("released", row.parcel.route, _due_ms(row)) for row in sendable]
        self.counters.settled(messages, outcomes, pace, now_ms)
        self.counters.sent(row.parcel.target for row in released)
        if held:
            report_held([(row.id, row.parcel, hold, row.attempts) for row, hold in held], self.counters)

    def _prepare_batch(self, rows: Sequence[Due]) -> tuple[list[Due], list[Outgoing], list[tuple[Due, Hold]]]:
        """Split ``rows`` into those to publish, by due instant, with their messages, and those to hold right away."""
        sendable: list[Due] = []
        batch: list[Outgoing] = []
        held: list[tuple[Due, Hold]] = []
        limits, now_ms = self.live.late_limits(), self.live.now_lower_ms()
        for row in sorted(rows, key=attrgetter("due_ms")):
            late_hold = too_late(row.due_ms, now_ms, limits.get(row.parcel.route), row.hold) if limits else None
            outgoing = late_hold or prepare_outgoing(row, self.publisher.max_properties)
            if isinstance(outgoing, Hold):
                held.append((row, outgoing))
            else:
                sendable.append(row)
                batch.append(outgoing)
        return sendable, batch, held


@dataclass(frozen=True)
class ReleaseService:
    """The release of this process: a loop for each of its lanes, built by ``release``."""

    releases: Releases
    release: Callable[[Lane], LaneRelease]

    async def run(self, stopping: asyncio.Event) -> None:
        """Release until the store yields no more lanes and every loop has closed its own. Raises the first bug."""
        try:
            async with asyncio.TaskGroup() as loops:
                async for lane in self.releases.lanes():
                    loops.create_task(self.release(lane).run(stopping), name=f"release lane {lane.number}")
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None


def _release_of(row: Due) -> Release:
    return row.id, row.due_ms, row.attempts


def _due_ms(row: Due) -> int | None:
    """Return when the row was due, to measure lateness; None if it was held, or due when parked."""
    return None if row.attempts or row.due_ms <= (row.parked_ms or 0) else row.due_ms


def _written_times(outcomes: Sequence[Outcome | None], pace: Pace, now_ms: float) -> list[float]:
    """Return when each confirmed message was written to the broker; ``now_ms`` if on the isolation connection."""
    confirmed = (index for index, outcome in enumerate(outcomes) if isinstance(outcome, Confirmed))
    return [pace.written_ms.get(index, now_ms) for index in confirmed]


def prepare_outgoing(row: Due, max_properties: int) -> Outgoing | Hold:
    """Return the message as it leaves, or a Hold if it cannot be published unchanged."""
    if not row.sound:
        return unfit("the stored bytes do not match their checksum, or a newer delayer wrote their format")
    _, _, _, _, (exchange, routing_key), stored, body, _, token, *_ = row.parcel
    token = token or b"%d" % row.id
    try:
        properties = released_properties(Properties.parse(stored), token, row.due_ms, max_properties)
    except Unpublishable as wrong:
        return unfit(str(wrong))
    except (MalformedProperties, MalformedTable) as broken:
        return unfit(f"malformed properties: {broken}")
    if len(exchange) > SHORT_STRING or len(routing_key) > SHORT_STRING:
        longest = max(len(exchange), len(routing_key))
        return unfit(
            f"the exchange or the routing key is too long: expected at most {SHORT_STRING} bytes, found {longest}"
        )
    form = Isolated if row.hold is not None and row.hold.isolated else Outgoing
    return form(exchange, routing_key, properties, body, token)
