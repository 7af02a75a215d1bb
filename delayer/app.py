"""``delayer run``: one daemon in one event loop, or a supervisor of several; its signals, and its exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from typing import Final, NoReturn

import structlog

from delayer import __version__, telemetry
from delayer.broker.errors import TopologyMismatch
from delayer.daemon import Daemon
from delayer.early_signals import STOPS, hear_reload
from delayer.ops import loop
from delayer.ops.notify import Notifier
from delayer.reload import Reload
from delayer.settings import ConfigError, Settings
from delayer.store.errors import BadStoreUrl, SchemaOutdated
from delayer.supervisor import worker
from delayer.supervisor.policy import MISUSED, REFUSED
from delayer.supervisor.service import Supervisor

log = structlog.get_logger(__name__)


def run_daemon(load: Callable[[], Settings]) -> NoReturn:
    """Run until SIGTERM or SIGINT; SIGHUP reads the configuration again through ``load``.

    Ends the process with the exit code: 0 stopped as told, 1 or 2 where a person has to decide first (the reason is
    logged). Raises ConfigError if the first ``load`` does.
    """
    telemetry.never_wait()
    number = worker.number(os.environ)
    if number is not None:
        telemetry.sign(worker=number)
        worker.do_not_outlive_supervisor()
    try:
        settings = load()
    except ConfigError as wrong:
        if number is None:
            raise
        log.error("start refused", reason=str(wrong), next_step="delayer check")
        loop.end(REFUSED + MISUSED)
    telemetry.configure(settings.log.format, settings.log.level)
    if number is None and settings.workers > 1:
        loop.end(loop.run(_supervise(settings, load)))
    code = _run_one(settings, load)
    loop.end(code + REFUSED if number is not None and code else code)


def _run_one(settings: Settings, load: Callable[[], Settings]) -> int:
    try:
        loop.run(_serve(settings, load))
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


GARBAGE_THRESHOLD: Final = 200_000
"""Containers made and not freed before the collector looks for cycles; Python's own 700 are a third of a batch, and it
took a third of the time of sorting one. Messages make no cycles; failures may, and are collected after
(delayer/services/retry.py)."""


def calm_the_collector() -> None:
    """What was imported lives as long as we do, and need not be looked through again and again."""
    gc.unfreeze()  # what the command line set aside
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD, 10, 10)


async def _supervise(settings: Settings, load: Callable[[], Settings]) -> int:
    supervisor = Supervisor(settings, load, Notifier())
    running = asyncio.get_running_loop()
    for signum in STOPS:
        running.add_signal_handler(signum, supervisor.stop)
    running.add_signal_handler(signal.SIGHUP, supervisor.reload)
    hear_reload()
    try:
        return await supervisor.run()
    finally:
        _heed_no_signals()


def _heed_no_signals() -> None:
    """We have stopped, and say with what exit code; an interpreter that ends takes its handlers away first, and an
    order to stop that comes again would kill it."""
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
    hear_reload()
    if worker.number(os.environ) is not None:
        worker.watch_supervisor(daemon.stop)
    log.info("starting", version=__version__, mode=settings.mode)
    daemon.life.add("reload", reload.run)
    if settings.http.listen:
        from delayer.serving import serve  # noqa: PLC0415 - its libraries take a tenth of a second to load

        serve(daemon)
    try:
        await daemon.run()
    finally:
        _heed_no_signals()
