"""SIGHUP: the daemon reads its configuration again and applies the live keys. An invalid one changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from delayer import telemetry
from delayer.broker.errors import TopologyMismatch
from delayer.core.errors import BrokerLost, StoreLost
from delayer.daemon import Daemon
from delayer.ops.notify import Notifier
from delayer.settings import ConfigError, Settings
from delayer.store.errors import BadStoreUrl, SchemaOutdated
from delayer.store.postgres import PostgresStore
from delayer.wiring import without_effect

log = structlog.get_logger(__name__)

STORE_WAIT: Final = 10.0
"""Seconds that a switch to store mode waits for a store that is out of reach."""


class Reload:
    """Runs reloads one after another; requests during a reload make one more reload."""

    def __init__(self, daemon: Daemon, load: Callable[[], Settings], notifier: Notifier) -> None:
        self._daemon = daemon
        self._load = load
        self._notifier = notifier
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Ask for a reload; safe in a signal handler of the loop."""
        self._requested.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve requests until stopping is set."""
        stop = asyncio.create_task(stopping.wait(), name="stopping")
        try:
            while not stopping.is_set():
                request = asyncio.create_task(self._requested.wait(), name="reload requested")
                await asyncio.wait([stop, request], return_when=asyncio.FIRST_COMPLETED)
                request.cancel()
                if self._requested.is_set():
                    self._requested.clear()
                    self._notifier.reloading()
                    refused = await self._reload()
                    mode = f"mode {self._daemon.settings.mode}"
                    # systemd knows no failed reload of this kind: `systemctl status` is where it can be told.
                    self._notifier.ready(f"{mode}; the last reload was refused: {refused}" if refused else mode)
        finally:
            stop.cancel()

    async def _reload(self) -> str:
        """The reason of a refusal, empty after a reload."""
        old = self._daemon.settings
        try:
            new = self._load()
            live, restart = old.diff(new)
            first_store = old.store_url is None
            wanted = live_part(old, new, first_store=first_store)
            await self._make_ready(wanted)
        except (ConfigError, BrokerLost, StoreLost, TopologyMismatch, BadStoreUrl, SchemaOutdated) as wrong:
            log.error("reload refused", reason=str(wrong))
            return str(wrong) or type(wrong).__name__
        telemetry.configure(wanted.log.format, wanted.log.level)
        self._daemon.adopt(wanted)
        if first_store:
            live += [key for key in restart if key.startswith("store.")]
            restart = [key for key in restart if not key.startswith("store.")]
        if restart:
            log.warning("restart needed", keys=restart)
        if old.mode != wanted.mode:
            log.info("mode switched", before=old.mode, now=wanted.mode)
        unpaced = without_effect(wanted)
        log.info("reloaded", keys=live, **({"max_rate_without_effect": unpaced} if unpaced else {}))
        return ""

    async def _make_ready(self, wanted: Settings) -> None:
        """Prepare the queues, exchanges and the store that the new settings need, before they apply."""
        await self._daemon.declare(wanted)
        if wanted.store_url is not None and not self._daemon.lanes.configured:
            # Tried first: lanes that meet an outdated schema stop the daemon, and a reload must not.
            store = await PostgresStore.connect(wanted.store_url)
            await store.close()
            self._daemon.start_lanes(wanted)
        elif wanted.mode == "store":
            await self._daemon.lanes.wait_usable(STORE_WAIT)


def live_part(old: Settings, new: Settings, *, first_store: bool) -> Settings:
    """``old``, with everything from ``new`` that may change while the daemon runs.

    ``first_store``: no store is in use yet, so all of ``[store]`` may. One in use holds messages: only a restart may
    leave it for another.
    """
    live = {"park_beyond_ms": new.store.park_beyond_ms, "restore_ahead_ms": new.store.restore_ahead_ms}
    store = new.store if first_store else old.store.model_copy(update=live)
    return old.model_copy(
        update={
            "mode": new.mode,
            "routes": new.routes,
            "destinations": new.destinations,
            "log": new.log,
            "intake": old.intake.model_copy(update={"max_delay_ms": new.intake.max_delay_ms}),
            "store": store,
            "http": old.http.model_copy(update={"token": new.http.token}),
        }
    )
