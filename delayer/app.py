"""``delayer run``: one daemon in one event loop, its signals and its exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import structlog
import uvloop

from delayer import __version__, telemetry
from delayer.broker.errors import TopologyMismatch
from delayer.daemon import Daemon
from delayer.ops.notify import Notifier
from delayer.reload import Reload
from delayer.settings import Settings
from delayer.store.errors import BadStoreUrl, SchemaOutdated

log = structlog.get_logger(__name__)

T = TypeVar("T")

STOPS: Final = (signal.SIGTERM, signal.SIGINT)


def run_daemon(load: Callable[[], Settings]) -> NoReturn:
    """Run until SIGTERM or SIGINT; SIGHUP reads the configuration again through ``load``.

    Ends the process with its exit code: 0 after an order to stop, 1 or 2 where a person has to decide first (the log
    has the reason), 1 after a bug. Raises ConfigError if the first ``load`` does.
    """
    settings = load()
    telemetry.log_in_background()
    telemetry.configure(settings.log.format, settings.log.level)
    try:
        code = _run(settings, load)
    except Exception:
        log.critical("failed", exc_info=True)
        code = 1
    telemetry.finish()
    # The interpreter's own end waits for a stuck reader of stderr, and for threads that look up a name (10 s beside a
    # silent name server).
    os._exit(code)


def _run(settings: Settings, load: Callable[[], Settings]) -> int:
    try:
        run_loop(_serve(settings, load))
    except TopologyMismatch as wrong:
        log.error("start refused", reason=str(wrong), next_step="delayer topology verify")
        return 1
    except BadStoreUrl as wrong:
        log.error("start refused", reason=str(wrong), next_step="correct store.url")
        return 2
    except SchemaOutdated as wrong:
        log.error("start refused", reason=str(wrong), next_step=wrong.advice)
        return 1
    return 0


def calm_the_collector(allocations: int = 200_000) -> None:
    """Take imported modules out of the garbage collector's sight, and let it run after so many allocations.

    Python's own 700 are a third of a batch, and the collector took a third of the time of classifying one. Messages
    make no cycles; delayer/services/retry.py collects after failures.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(allocations, 10, 10)


def _heed_no_signals() -> None:
    """Ignore further signals, so that the process ends with its own exit code."""
    for signum in (*STOPS, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


async def _serve(settings: Settings, load: Callable[[], Settings]) -> None:
    notifier = Notifier()
    daemon = Daemon(settings, notifier)
    calm_the_collector()
    reload = Reload(daemon, load, notifier)
    running = asyncio.get_running_loop()
    for signum in STOPS:
        running.add_signal_handler(signum, daemon.stop)
    running.add_signal_handler(signal.SIGHUP, reload.request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # delayer/commands/run.py blocked it
    log.info("starting", version=__version__, mode=settings.mode)
    daemon.life.add("reload", reload.run)
    if settings.http.listen:
        from delayer.serving import serve  # noqa: PLC0415 - its libraries take a tenth of a second to load

        serve(daemon)
    try:
        await daemon.run()
    finally:
        _heed_no_signals()


def run_loop(main: Coroutine[Any, Any, T], *, leave: float = 0.5) -> T:
    """Run ``main`` in a new loop, and return its result.

    Tasks that ``main`` leaves behind are cancelled, and get ``leave`` seconds to end. asyncio's own runner waits
    without limit, and a driver that closes connections to a server that hangs takes seconds (seen: five). The other
    tasks end with the process. The loop stays open: closing it would wait for threads that look up names.
    """
    loop = uvloop.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_send_away(leave))
        asyncio.set_event_loop(None)


async def _send_away(seconds: float) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    done, left = await asyncio.wait(tasks, timeout=seconds) if tasks else (set(), set())
    for task in done:
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("part failed too", reason=repr(failure))
    if left:
        # They are destroyed while pending, which would be reported once more for each of them.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        log.warning("tasks left behind", tasks=sorted(task.get_name() for task in left), after_seconds=seconds)
