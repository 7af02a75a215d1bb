"""``delayer run``: one daemon in one event loop, its signals, reloads and exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

import structlog
import uvloop

from delayer import __version__
from delayer.amqp.errors import BrokerLost
from delayer.broker.errors import BrokerRefused, TopologyMismatch
from delayer.broker.publisher import AmqpPublisher
from delayer.config import logs
from delayer.config.errors import ConfigError, Problem
from delayer.config.model import Settings, Table, UrlTable
from delayer.config.topology import without_effect
from delayer.config.values import within
from delayer.core.errors import StoreLost
from delayer.daemon.live_settings import rates_of
from delayer.daemon.systemd import Notifier
from delayer.daemon.wiring import Daemon
from delayer.retry import first_set
from delayer.store.errors import SchemaOutdated, StoreUnfit
from delayer.store.postgres import PostgresStore

if TYPE_CHECKING:
    from delayer.daemon.tracing import Spans

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Reload:
    """Runs reloads in turn; requests during a reload cause one more."""

    daemon: Daemon
    load: Callable[[], Settings]
    notifier: Notifier
    _requested: asyncio.Event = field(default_factory=asyncio.Event)

    def request(self) -> None:
        """Request a reload; safe in a signal handler of the loop."""
        self._requested.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve requests until ``stopping`` is set."""
        while not stopping.is_set():
            await first_set(stopping, self._requested)
            if self._requested.is_set():
                self._requested.clear()
                self.notifier.reloading()
                refused = await self._reload()
                mode = f"mode {self.daemon.settings.mode}"
                # systemd has no notion of a failed reload, so report it in the status line.
                self.notifier.report(f"{mode}; the last reload was refused: {refused}" if refused else mode)

    async def _reload(self) -> str:
        """Reload. Returns why it was refused, or ""."""
        old = self.daemon.settings
        try:
            new = self.load()
            wanted = live_part(old, new)
            self.daemon.live.add_routes(wanted)
            away = await self._make_ready(wanted)
        except (ConfigError, BrokerRefused, TopologyMismatch, SchemaOutdated, StoreUnfit) as wrong:
            self.daemon.live.adopt(old)
            log.error("reload refused", reason=str(wrong))
            return str(wrong) or type(wrong).__name__
        logs.configure(wanted.log.format, wanted.log.level)
        self.daemon.live.adopt(wanted)
        keys, restart = changed(old, wanted), changed(wanted, new)
        self.daemon.restart_needed = restart
        if restart:
            log.warning("restart needed", keys=restart, next_step="restart the daemon")
        if old.mode != wanted.mode:
            log.info("mode switched", before=old.mode, now=wanted.mode)
        unpaced = without_effect(wanted)
        if keys or not restart:  # Otherwise nothing was applied, and "reloaded" would suggest it was.
            more = {"max_rate_without_effect": unpaced, "out_of_reach": away}
            log.info("reloaded", keys=keys, **{name: found for name, found in more.items() if found})
        return ""

    async def _make_ready(self, wanted: Settings) -> list[str]:
        """Prepare the queues, exchanges and the store for new settings, before they apply. Returns why some could not
        be reached: the daemon's loops keep trying. Raises the errors that refuse a reload."""
        store = self.daemon.store
        is_new = wanted.store_url is not None and not store.configured
        steps: list[Callable[[], Awaitable[None]]] = [partial(self.daemon.declare, wanted)]
        if is_new:
            # Try it first: lanes that meet an outdated schema stop the daemon, and a reload must not.
            steps.append(partial(_try_store, wanted))
        elif wanted.mode == "store":
            steps += [partial(store.wait_usable, 10.0), partial(store.limit, rates_of(wanted))]
        away = []
        for step in steps:
            try:
                await step()
            except (BrokerLost, StoreLost) as lost:
                away.append(str(lost))
        if is_new:
            self.daemon.start_store(wanted)
        return away


async def _try_store(settings: Settings) -> None:
    store = await PostgresStore.connect(lambda: settings.store_url or "")
    await store.close()


def live_part(old: Settings, new: Settings) -> Settings:
    """Return ``old`` with everything from ``new`` that may change while the daemon runs. All of ``[store]`` may change
    while no store is in use. A store in use holds messages, so a change needs a restart."""
    live: dict[str, object]
    live = {"park_beyond_ms": new.store.park_beyond_ms, "restore_ahead_ms": new.store.restore_ahead_ms}
    live |= _url_of_file(old.store, new.store)
    store = new.store if old.store_url is None else old.store.model_copy(update=live)
    return old.model_copy(
        update={
            "mode": new.mode,
            "broker": old.broker.model_copy(update=_url_of_file(old.broker, new.broker)),
            "routes": new.routes,
            "destinations": new.destinations,
            "log": new.log,
            "intake": old.intake.model_copy(update={"max_delay_ms": new.intake.max_delay_ms}),
            "store": store,
            "http": old.http.model_copy(update={"tokens_file": new.http.tokens_file, "open": new.http.open}),
        }
    )


def _url_of_file(old: UrlTable, new: UrlTable) -> dict[str, object]:
    """The new URL, if both come from the same file and name the same place: every new connection uses it already."""
    if not (old.url and new.url and old.url_file and old.url_file == new.url_file):
        return {}
    return {"url": new.url} if within(old.url.reveal()) == within(new.url.reveal()) else {}


def changed(old: Settings, new: Settings) -> list[str]:
    """List the keys that differ. A list of tables is one key."""
    after = _leaves(new)
    return [key for key, value in _leaves(old).items() if value != after[key]]


def _leaves(table: Table, at: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, one in type(table).model_fields.items():
        key, value = at + (one.alias or name), getattr(table, name)
        found |= _leaves(value, f"{key}.") if isinstance(value, Table) else {key: value}
    return found


STOPS: Final = (signal.SIGTERM, signal.SIGINT)


def spans_of(environ: Mapping[str, str]) -> Spans | None:
    """Create the source of spans; None unless a standard variable names a collector. Raises ConfigError without the
    extra."""
    variables = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    named = [name for name in variables if environ.get(name)]
    if not named:
        return None
    try:
        from delayer.daemon.tracing import Spans  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as missing:
        raise ConfigError([Problem("environment", named[0], "the extra otel", str(missing))]) from None
    return Spans()


def run_daemon(load: Callable[[], Settings]) -> NoReturn:
    """Run until SIGTERM or SIGINT. On SIGHUP, reread the configuration through ``load``.

    Exits with code 0 after an order to stop, 1 if an operator has to act first (the log has the reason), 1 after a bug.
    Raises ConfigError if the first ``load`` does, or an extra is missing.
    """
    settings, spans = load(), spans_of(os.environ)
    logs.log_in_background()
    logs.configure(settings.log.format, settings.log.level)
    loop, code = uvloop.new_event_loop(), 1
    try:
        loop.run_until_complete(_serve(settings, load, spans))
        code = 0
    except (TopologyMismatch, SchemaOutdated, StoreUnfit) as wrong:
        log.error("start refused", reason=str(wrong), next_step=wrong.advice or "delayer topology verify")
    except Exception:
        log.critical("failed", exc_info=True)
    logs.flush_background()
    # Tasks that are left end here, as in a crash. A normal exit would wait for them, for a stuck reader of stderr, and
    # for name look-ups (10 s for a silent name server).
    os._exit(code)


def tune_gc() -> None:
    """Exclude imported modules from the garbage collector, and run it every 200,000 allocations.

    Python's default of 700 is a third of a batch, and collecting took a third of the time of classifying a batch.
    Messages do not form cycles; delayer/retry.py collects after failures.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)


async def _serve(settings: Settings, load: Callable[[], Settings], spans: Spans | None) -> None:
    notifier = Notifier()
    daemon = Daemon(settings, notifier, AmqpPublisher if spans is None else spans.publisher)
    tune_gc()
    reload = Reload(daemon, load, notifier)
    running = asyncio.get_running_loop()
    for signum in STOPS:
        running.add_signal_handler(signum, daemon.stop)
    running.add_signal_handler(signal.SIGHUP, reload.request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # delayer/cli/run.py blocked it
    log.info("starting", version=__version__, mode=settings.mode)
    daemon.services.add("reload", reload.run)
    if settings.http.listen or settings.http.metrics_listen:
        from delayer.daemon.http import serve  # noqa: PLC0415 - its libraries take a tenth of a second to load

        serve(daemon)
    try:
        await daemon.run()
    finally:
        # Ignore further signals, so that the process exits with its own code.
        for signum in (*STOPS, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        if spans is not None:
            await asyncio.to_thread(spans.flush)
