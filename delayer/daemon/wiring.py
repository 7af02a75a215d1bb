"""The daemon: its connections and parts, built from settings. The rules are in the services."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Literal

import structlog

from delayer.amqp.connection import Connection
from delayer.amqp.errors import BrokerLost
from delayer.broker.addresses import addresses_of
from delayer.broker.connection import ReconnectingConnection
from delayer.broker.consumer import BUFFER_BYTES, AdaptivePrefetch, AmqpConsumer, FlowControl
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.isolation import Isolation
from delayer.broker.pipelined_admin import pipelined_admin
from delayer.broker.publisher import CONFIRM_TIMEOUT, AmqpPublisher
from delayer.config.model import Settings
from delayer.config.topology import cascade_of, uses_cascade
from delayer.core.backoff import LogThrottle
from delayer.core.cascade import LEVELS, Cascade
from delayer.core.counters import Counters
from delayer.daemon.drift import DeclaredTopology
from delayer.daemon.live_settings import LiveSettings, rates_of
from delayer.daemon.services import ServiceGroup
from delayer.daemon.store_bond import StoreBond
from delayer.daemon.systemd import Notifier, Watchdog, condition
from delayer.intake.consume import Handler, Intake, QueueConsumer
from delayer.intake.dispatch import Dispatch
from delayer.intake.handle import DueHandler, IntakeHandler
from delayer.intake.inbox import NAME as INBOX
from delayer.intake.inbox import InboxHandler
from delayer.intake.takeover import LevelTakeover, intake_of
from delayer.release.loop import LaneRelease, Release, ReleaseService
from delayer.release.ports import Lane
from delayer.retry import first_set
from delayer.store.backlog import PostgresBacklog
from delayer.store.inbox import SqlInbox
from delayer.store.postgres import PostgresStore
from delayer.store.restoring import SegmentRestorer

log = structlog.get_logger(__name__)


class Connections(dict[str, ReconnectingConnection]):
    """The broker connections by use: ``intake``, ``due``, ``publish``, ``takeover`` (if configured)."""

    def __init__(self, settings: Settings, accept: Callable[[Connection], Awaitable[None]]) -> None:
        """``accept``: see ReconnectingConnection."""
        heartbeat, throttle = settings.broker.heartbeat_ms / 1000, LogThrottle()
        addresses = lambda: addresses_of(settings.broker_url)  # noqa: E731
        reconnecting = partial(ReconnectingConnection, addresses, heartbeat=heartbeat, throttle=throttle, accept=accept)
        uses = ("intake", "due", "publish", *(["takeover"] if settings.takeovers else []))
        super().__init__({use: reconnecting(f"delayer {use}") for use in uses})
        self.isolation = Isolation(self["publish"], timeout=CONFIRM_TIMEOUT)

    def open(self) -> list[Connection]:
        return [one.current for one in self.values() if one.current is not None]


STORE_WAIT: Final = 2.0
"""Seconds that consuming waits for a lane before it logs that there is none, and waits again."""


class Daemon:
    """One process of ``delayer run``. ``publisher``: creates publishers (daemon/tracing.py)."""

    def __init__(
        self, settings: Settings, notifier: Notifier, publisher: Callable[..., AmqpPublisher] = AmqpPublisher
    ) -> None:
        self.counters = Counters(settings.http.metrics_routes)
        self._notifier = notifier
        self.services = ServiceGroup()
        self.watchdog = Watchdog(notifier)
        self._bond = StoreBond()
        self.topology = DeclaredTopology()
        self.connections = Connections(settings, self._bond.check)
        self.new_publisher = partial(publisher, self.connections["publish"], isolation=self.connections.isolation)
        self._publisher, self._limited_publisher = self.new_publisher(), self.new_publisher()
        self._confirmed: dict[Release, None] = {}
        self.store = PostgresBacklog(self.connections["publish"], heartbeat=self.watchdog, counters=self.counters)
        self.live = LiveSettings(settings, cascade_of(settings), self._publisher, self.store)
        self._dispatch = Dispatch(self._publisher, self.store, self.live, self.counters)
        self._intake = self._consumer_of(
            "intake", settings.intake.queue, IntakeHandler(self.live, self._dispatch, self.store, self.counters)
        )
        self._due: QueueConsumer | None = None
        self._inbox: QueueConsumer | None = None
        self._levels: list[QueueConsumer] = []
        self._begun = False
        self.restart_needed: Sequence[str] = ()
        """Keys that the last reload found changed, and that need a restart."""

    @property
    def settings(self) -> Settings:
        return self.live.settings

    async def run(self) -> None:
        """Run until :meth:`stop`. Raises TopologyMismatch, SchemaOutdated, StoreUnfit if an operator has to decide."""
        for connection in self.connections.values():
            connection.start()
        if self.settings.store_url is not None:
            self.start_store(self.settings)
        self.services.add("intake", self._intake.run)
        self._levels = self._takeovers()
        for part in self._levels:
            self.services.add(part.intake.queue, part.run)
        self.services.add("drift", partial(self.topology.watch, self._bond, self.connections, self.live))
        self.services.add("watchdog", self.watchdog.feed)
        self.services.add("readiness", self._announce)
        self._notifier.report("starting")
        self.services.add("condition", lambda stopping: self._notifier.watch(self._condition, stopping))
        try:
            await self.services.run()
        finally:
            # Together and with a limit: a hanging broker answers no close, and a stop may take at most ten seconds.
            self.connections.isolation.close()
            closing = [connection.close() for connection in self.connections.values()]
            await asyncio.wait([asyncio.create_task(one) for one in closing], timeout=1.0)
            log.info("stopped", **self.counters.as_dict())

    def stop(self) -> None:
        """Stop consuming, settle messages in flight, drop the lanes."""
        log.info("stopping")
        self._notifier.stopping()
        self.services.stop()

    def start_store(self, settings: Settings) -> None:
        """Start acquiring lanes of the store, unless the daemon already does."""
        if not self.store.configured:

            async def connect() -> PostgresStore:
                store = await PostgresStore.connect(
                    lambda: settings.store_url or "", history_days=settings.store.history_days
                )
                try:
                    await self._bond.attach(store, self.connections.open())
                except BaseException:
                    await store.close()
                    raise
                return store

            self.store.configure(connect, rates_of(settings))
            self.services.add("store", self.store.run, last=True)
            self.services.add("release", ReleaseService(self.store, self._release).run, last=True)
            self._inbox = self._inbox_consumer()
            self.services.add("inbox", self._inbox.run)
            restorer = SegmentRestorer(self.store, lambda: self.live.settings.store.restore_ahead_ms, self.counters)
            self.services.add("restoring", restorer.run)

    @property
    def _consumers(self) -> dict[str, QueueConsumer]:
        found = {self.settings.intake.queue: self._intake}
        return found | {one.intake.queue: one for one in (self._due, self._inbox) if one is not None}

    def consuming(self) -> dict[str, bool]:
        """Whether each queue of the broker is being consumed."""
        return {queue: one.consuming.is_set() for queue, one in self._consumers.items() if one is not self._inbox}

    def unsettled(self) -> dict[str, float]:
        """The stuck queues, each with the seconds in which nothing read from it was settled."""
        consumers = self._consumers | {level.intake.queue: level for level in self._levels}
        return {queue: stuck for queue, one in consumers.items() if (stuck := one.unsettled.stuck_seconds)}

    def unsteady(self) -> dict[str, str]:
        """The queues whose consumer is interrupted again and again, each with the last reason."""
        return {queue: reason for queue, one in self._consumers.items() if (reason := one.unsteady)}

    @property
    def intake(self) -> Literal["active", "standby", ""]:
        """This process's role at the intake queue, as far as known; "" if it does not consume."""
        if not self._intake.consuming.is_set():
            return ""
        return "active" if self._intake.active or self.store.is_alone else "standby"

    def _condition(self) -> str:
        connections = self.connections.values()
        stuck = self.unsettled() | self.unsteady()
        return condition(
            connected=all(one.current is not None for one in connections),
            blocked=any(one.blocked for one in connections),
            no_lane=self.store.reason,
            stuck=[*map("lane {}".format, self.store.stuck), *map("queue {!r}".format, stuck)],
            intake=self.intake,
            topology=self.topology.reason,
        )

    async def declare(self, settings: Settings | None = None) -> None:
        """Declare the topology. Raises BrokerLost, BrokerRefused, TopologyMismatch."""
        wanted = settings or self.settings
        async with pipelined_admin(self.settings.broker_url, "delayer admin") as broker:
            await self._bond.check(broker.connection)
            await (self.topology.keep if settings is None else self.topology.declare)(broker, wanted)
            # Earlier messages may still be in the cascade, although new messages do not use it.
            if self._due is None and (uses_cascade(wanted) or await broker.exists(wanted.native.due_queue)):
                handler = DueHandler(self.live, self._dispatch)
                self._due = self._consumer_of("due", wanted.native.due_queue, handler)
                self.services.add("due", self._due.run)
            await self.live.choose_strategy(broker, wanted, self.connections["intake"].connects)

    async def _declare_again(self) -> None:
        """Declare as at the start. After the start, a mismatch does not stop the daemon: it keeps releasing, and
        retries until an operator fixes the mismatch. Raises BrokerLost; TopologyMismatch at the start."""
        try:
            await self.declare()
        except BrokerRefused as refused:
            raise BrokerLost(str(refused), advice=refused.advice) from refused
        except TopologyMismatch as wrong:
            if not self._begun:
                raise
            raise BrokerLost(str(wrong)) from wrong

    async def _prepare(self) -> None:
        await self._declare_again()
        if self.live.no_delays and self.settings.native.strategy == "queue":
            # The daemon still consumes the due queue, so messages already in the cascade are delivered.
            raise BrokerLost(f'native.strategy is "queue", and the broker cannot: {self.live.no_delays}')
        if self.settings.mode == "store":
            await self.store.wait_usable(STORE_WAIT)
        else:
            await self.store.wait_known(5.0)  # Without a lane, native mode refuses every key.

    async def _announce(self, stopping: asyncio.Event) -> None:
        """Report READY to systemd once the daemon consumes, or is a spare that waits for a share of the lanes."""
        consuming, spare = self._intake.consuming, self.store.spare
        begun = await first_set(consuming, spare, stopping)
        if spare in begun and consuming not in begun:
            self._report_ready()
            begun = await first_set(consuming, stopping)
        if consuming in begun:
            log.info("ready", mode=self.settings.mode)
            self._report_ready()

    def _report_ready(self) -> None:
        self._begun = True
        self._notifier.condition(self._condition())
        self._notifier.ready(f"mode {self.settings.mode}")

    def _consumer_of(self, use: str, queue: str, handler: Handler) -> QueueConsumer:
        intake = Intake(
            queue, self.settings.intake.prefetch, give_back_after=self.settings.intake.give_back_after_ms / 1000
        )
        prepare = self._prepare if use == "intake" else self._declare_again
        one_active = use == "intake" and self.settings.intake.consumers == "one"
        consumer = AmqpConsumer(
            self.connections[use], adaptive_prefetch=AdaptivePrefetch(BUFFER_BYTES), one_active=one_active
        )
        return QueueConsumer(intake, consumer, handler, prepare=prepare, heartbeat=self.watchdog, reached=self._reached)

    def _inbox_consumer(self) -> QueueConsumer:
        inbox = SqlInbox(self.store)
        return QueueConsumer(
            Intake(INBOX, self.settings.intake.prefetch, self.settings.intake.give_back_after_ms / 1000),
            inbox,
            InboxHandler(self.live, self._dispatch, inbox, self.counters),
            prepare=self._declare_again,
            heartbeat=self.watchdog,
            reached=self._reached,
        )

    def _reached(self) -> tuple[int, bool]:
        """Changes when a connection to the broker is open again, or the store is usable again."""
        return sum(one.connects for one in self.connections.values()), self.store.usable

    def _takeovers(self) -> list[QueueConsumer]:
        """Build a takeover for each level, longest first. They share a dedicated connection and 16 MiB of prefetch. A
        batch is at most 1 MiB, because each of about twenty levels may have two parks open at once."""
        cascades = [(Cascade(one.cascade, owner=one.prefix), one.levels_from) for one in self.settings.takeovers]
        levels = [(cascade, level) for cascade, lowest in cascades for level in reversed(range(lowest, LEVELS))]
        all_bytes = 16 << 20
        flow_control = FlowControl(all_bytes)
        return [
            QueueConsumer(
                intake_of(cascade.level(level)),
                AmqpConsumer(
                    self.connections["takeover"],
                    flow_control=flow_control,
                    adaptive_prefetch=AdaptivePrefetch(all_bytes // len(levels)),
                ),
                LevelTakeover(cascade, level, self.store, self.live, self.counters),
                prepare=lambda: self.store.wait_usable(STORE_WAIT),
                heartbeat=self.watchdog,
                reached=self._reached,
            )
            for cascade, level in levels
        ]

    def _release(self, lane: Lane) -> LaneRelease:
        publisher = self.new_publisher() if lane.route is None else self._limited_publisher
        return LaneRelease(lane, publisher, self.live, self.watchdog, self.counters, self._confirmed)
