"""The running daemon: its parts, constructed from settings and wired to each other. The rules are in the services."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Final

import structlog

from delayer.broker.brief import briefly
from delayer.broker.consumer import RelayConsumer
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.flow_control import BUFFER_BYTES, Fitting
from delayer.broker.publisher import RelayPublisher
from delayer.core.errors import BrokerLost
from delayer.declaring import declare_in_detail
from delayer.in_force import InForce
from delayer.ops.notify import Condition, Notifier, Seen, WatchedPulse
from delayer.relays import Relays
from delayer.services.consume import Handle, Intake, QueueConsumer
from delayer.services.counting import Counters
from delayer.services.dispatch import Dispatch
from delayer.services.handle import DueHandler, IntakeHandler
from delayer.services.lane_manager import LaneManager
from delayer.services.lifecycle import Life
from delayer.services.ports import Lane, Store
from delayer.services.release import Portion, Release
from delayer.services.restoring import Restoring
from delayer.services.room import Room
from delayer.services.takeover import LevelTakeover
from delayer.settings import Settings
from delayer.store import retry
from delayer.store.postgres import PostgresStore
from delayer.takeovers import takeovers_of
from delayer.wiring import cascade_of, topology_of, uses_cascade

log = structlog.get_logger(__name__)

STORE_WAIT: Final = 2.0
"""Seconds that consuming waits for a lane before it says that there is none, and waits again."""
LANES_WAIT: Final = 5.0
"""Seconds that it waits in native mode, for a store that is in reach: without a lane it would refuse every key."""

DUE_GATHER: Final = 0.005
"""Seconds that what came out of the cascade may wait for company (see Intake): all of it is due, and later by that."""

FAREWELL: Final = 1.0
"""Seconds for closing the connections in order, after everything is settled."""


def new_id() -> bytes:
    """An ``x-delayer-id`` for a message that no store has numbered."""
    return uuid.uuid4().hex.encode()


class Daemon:
    """One process of ``delayer run``."""

    def __init__(self, settings: Settings, notifier: Notifier) -> None:
        self.counters = Counters()
        self._notifier = notifier
        self.life = Life()
        self._pulse = WatchedPulse(notifier)
        self._condition = Condition(notifier, self._seen)
        self.relays = Relays(settings)
        self._cascade = cascade_of(settings)
        self._publisher = RelayPublisher(self.relays["publish"], isolation=self.relays.isolation)
        self._room = Room()
        self.lanes = LaneManager(
            self._release,
            limited=lambda: self._in_force.rates,
            pulse=self._pulse,
            counters=self.counters,
            reaching=lambda: self.relays["publish"].current is not None,
            broker=self.relays.broker_mark,
        )
        self._in_force = InForce(settings, self._cascade, self._publisher, self.lanes)
        self._dispatch = Dispatch(
            self._publisher, self.lanes, self._in_force, self.counters, new_id=new_id, pause_ms=retry.pause_ms
        )
        self._intake = self._session(
            "intake",
            settings.intake.queue,
            IntakeHandler(self._in_force, self._dispatch, self.lanes, self.counters, new_id),
        )
        self._due: QueueConsumer | None = None
        self._begun = False

    @property
    def settings(self) -> Settings:
        """Those in force."""
        return self._in_force.settings

    async def run(self) -> None:
        """Until :meth:`stop`. Raises TopologyMismatch, SchemaOutdated where a person has to decide."""
        self.relays.start()
        if self.settings.store_url is not None:
            self.start_lanes(self.settings)
        self.life.add("intake", self._intake.run)
        for part in self._takeovers():
            self.life.add(part.queue, part.run)
        self.life.add("watchdog", self._pulse.feed)
        self.life.add("readiness", self._announce)
        self._notifier.status("starting")
        self.life.add("condition", self._condition.run)
        try:
            await self.life.run()
        finally:
            # Side by side and bounded: a broker that hangs answers no goodbye, and ten seconds are promised for all.
            farewells = self.relays.closings()
            await asyncio.wait([asyncio.create_task(farewell) for farewell in farewells], timeout=FAREWELL)
            log.info("stopped", **self.counters.as_dict())

    def stop(self) -> None:
        """Stop consuming, settle what is in flight, let go of the lanes."""
        log.info("stopping")
        self._notifier.stopping()
        self.life.stop()

    def start_lanes(self, settings: Settings) -> None:
        """Begin to take lanes of the store, unless we do already."""
        if not self.lanes.configured:
            url = settings.store_url or ""

            async def connect() -> Store:
                await self.relays.meet_broker()
                return await PostgresStore.connect(url, broker=self.relays.broker_mark)

            self.lanes.configure(connect)
            self.life.add("lanes", self.lanes.run, last=True)
            restoring = Restoring(self.lanes, ahead_ms=self._in_force.restore_ahead_ms, counters=self.counters)
            self.life.add("restoring", restoring.run)

    def consuming(self) -> dict[str, bool]:
        """Which queues are consumed just now."""
        sessions = {self.settings.intake.queue: self._intake, self.settings.native.due_queue: self._due}
        return {queue: one.consuming.is_set() for queue, one in sessions.items() if one is not None}

    def _seen(self) -> Seen:
        return Seen(
            connected=self.relays.connected(),
            blocked=self.relays.blocked(),
            store=self.lanes.configured,
            usable=self.lanes.usable,
            consuming=self._intake.consuming.is_set(),
        )

    def stalled(self) -> list[str]:
        """The loops that stand still."""
        return self._pulse.stalled()

    def adopt(self, settings: Settings) -> None:
        """Let the live part of new settings rule from the next batch on."""
        self._in_force.adopt(settings)

    async def declare(self, settings: Settings | None = None) -> None:
        """Make the topology so. Raises BrokerLost, TopologyMismatch."""
        wanted = settings or self.settings
        try:
            async with briefly(self.settings.broker_url, "delayer admin") as broker:
                if not await broker.declared(topology_of(wanted)):
                    await declare_in_detail(self.settings.broker_url, topology_of(wanted))
                # Messages may still be on their way through a cascade that new delays do not take any more.
                if self._due is None and (uses_cascade(wanted) or await broker.exists(wanted.native.due_queue)):
                    self._start_due(wanted)
        except BrokerRefused as refused:
            raise BrokerLost(str(refused)) from refused

    def _start_due(self, wanted: Settings) -> None:
        handler = DueHandler(self._in_force, self._dispatch, new_id)
        self._due = self._session("due", wanted.native.due_queue, handler)
        self.life.add("due", self._due.run)

    async def _declare_again(self) -> None:
        """As at the start, but that what is there and different ends nobody who has begun: what is parked is released,
        and this is tried again until somebody has decided. Raises BrokerLost; TopologyMismatch at the start."""
        try:
            await self.declare()
        except TopologyMismatch as wrong:
            if not self._begun:
                raise
            raise BrokerLost(str(wrong)) from wrong

    async def _prepare(self) -> None:
        await self._declare_again()
        if self.settings.mode == "store":
            await self.lanes.wait_usable(STORE_WAIT)
        else:
            await self.lanes.wait_known(LANES_WAIT)

    async def _announce(self, stopping: asyncio.Event) -> None:
        """Tell systemd that we are ready, when we are: consuming, and with lanes where lanes are needed."""
        consuming = asyncio.create_task(self._intake.consuming.wait(), name="consuming")
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        await asyncio.wait([consuming, stop], return_when=asyncio.FIRST_COMPLETED)
        if consuming.done():
            self._begun = True
            log.info("ready", mode=self.settings.mode)
            self._condition.tell()
            self._notifier.ready(f"mode {self.settings.mode}")
        consuming.cancel()
        stop.cancel()

    def _session(self, use: str, queue: str, handle: Handle) -> QueueConsumer:
        intake = Intake(
            queue, self.settings.intake.prefetch, give_back_after=self.settings.intake.give_back_after_ms / 1000
        )
        if use == "due":
            intake = replace(intake, gather=DUE_GATHER)
        prepare = self._prepare if use == "intake" else self._declare_again
        consumer = RelayConsumer(self.relays[use], fitting=Fitting(BUFFER_BYTES))
        return QueueConsumer(intake, consumer, handle, prepare=prepare, pulse=self._pulse)

    def _takeovers(self) -> list[LevelTakeover]:
        if "takeover" not in self.relays:
            return []
        return takeovers_of(
            self.settings,
            self.relays["takeover"],
            parking=self.lanes,
            prepare=lambda: self.lanes.wait_usable(STORE_WAIT),
            now_ms=self._in_force.now_ms,
            pulse=self._pulse,
            counters=self.counters,
        )

    def _release(self, lane: Lane) -> Release:
        publisher = RelayPublisher(self.relays["publish"], isolation=self.relays.isolation)
        return Release(
            lane,
            publisher,
            portion=Portion(),
            pulse=self._pulse,
            counters=self.counters,
            now_ms=self._in_force.sure_ms,
            late_limits=self._in_force.late_limits,
            rate=lambda: None if lane.route is None else self._in_force.rates.get(lane.route),
            room=self._room,
        )
