"""Logs: one event name for each kind of event, one line for each event, and no secrets. docs/events.md explains every
name; a test compares that page with the code.

Modules log through ``structlog.get_logger(__name__)``. Loading structlog takes 40 ms, so modules of short commands use
the standard library instead, with the details as ``extra``; :func:`configure` formats both alike. Logs go to stderr,
because stdout is for the result of a command. Values are cleaned before they are written: strings from outside (header
values, names, the broker's texts) may contain line ends and terminal codes, and must not forge a line of the log.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Final, Literal, TextIO

import structlog

from delayer.core.backoff import LINES
from delayer.core.readable import readable

_DEEPEST = 6
# Below warnings, these libraries log about themselves: at debug level whole frames, with bodies and the login.
_LIBRARIES = ("aio_pika", "aiormq", "pamqp", "alembic", "sqlalchemy", "asyncio")
# These libraries log errors, with tracebacks, that they also raise. delayer logs each error once.
_TALKATIVE = ("aiormq.connection", "asyncpg.pool")

Event = MutableMapping[str, Any]

log = structlog.get_logger(__name__)


def _clean(value: object, depth: int = 0) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | bytes | bytearray | memoryview):
        return readable(value)
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {readable(str(key)): _clean(one, depth + 1) for key, one in value.items()}
    if depth < _DEEPEST and isinstance(value, Sequence | set | frozenset):
        return [_clean(one, depth + 1) for one in value]
    return readable(str(value))


def clean_values(_logger: object, _method: str, event: Event) -> Event:
    """Processor that makes every value of the event readable, on one line, and without passwords."""
    for key, value in event.items():
        if key == "exception" and isinstance(value, str):
            # A traceback keeps its lines, but indented, so that none can pass for an event.
            event[key] = readable(value, keep_lines=True).replace("\n", "\n    ")
        elif not key.startswith("_"):
            event[key] = _clean(value)
    return event


MOST_KINDS: Final = 100
"""The kinds that a window counts separately; the rest share the place ELSEWHERE."""
ELSEWHERE: Final = "(others)"
WINDOW_SECONDS: Final = 10.0


class _Limited:
    """Processor: it bounds the lines about single messages, which have an ``id`` or a ``message_id``. A line for each
    message of a flood would block the event loop. A window passes the first LINES of a kind: an event, and the exchange
    or lane of its message. The rest are counted, and reported when the window ends."""

    def __init__(self) -> None:
        self._begun = -WINDOW_SECONDS
        self._passed: Counter[tuple[str, object]] = Counter()
        self._left_out: Counter[tuple[str, object]] = Counter()

    def __call__(self, _logger: object, _method: str, event: Event) -> Event:
        if "message_id" not in event and "id" not in event:
            return event
        now = time.monotonic()
        if now >= self._begun + WINDOW_SECONDS:
            self.report(now)
            with suppress(RuntimeError):  # Without an event loop, the first line of the next window reports.
                asyncio.get_running_loop().call_later(WINDOW_SECONDS, self._end, now)
        kind = event["event"], event.get("exchange", event.get("lane"))
        if kind not in self._passed and len(self._passed) >= MOST_KINDS:
            kind = event["event"], ELSEWHERE
        passes = self._passed[kind] < LINES
        self._passed[kind] += passes
        # ``more``: how many lines after this one were not even created (first_of_each).
        self._left_out[kind] += event.pop("more", 0) + (not passes)
        if not passes:
            raise structlog.DropEvent
        return event

    def _end(self, begun: float) -> None:
        if begun == self._begun:  # A line may have begun the next window before this timer ran.
            self.report()

    def report(self, begin: float = -WINDOW_SECONDS) -> None:
        """End the window, and report the lines left out. Begin another window if its start is given."""
        left_out, self._left_out = self._left_out, Counter()
        self._begun = begin
        self._passed.clear()
        for (event, place), lines in left_out.items():
            if lines:
                log.warning("log lines left out", of=event, place=place, lines=lines, seconds=WINDOW_SECONDS)


_limited = _Limited()


def _ordered(_logger: object, _method: str, event: Event) -> Event:
    first = {name: event.pop(name) for name in ("timestamp", "level", "event", "logger") if name in event}
    return {**first, **event}


class _Background(QueueHandler):
    """A bounded queue of formatted lines. A thread writes them to stderr, and may block there: a pipe without a reader
    takes 64 KiB, and then its writer waits. When the queue is full, the handler drops and counts lines until the thread
    has written the rest. So there is one gap, followed by a line with the count."""

    queue: queue.Queue[logging.LogRecord]

    def __init__(self, lines: int) -> None:
        super().__init__(queue.Queue(lines))
        self.dropped = 0
        writer = logging.StreamHandler(sys.stderr)
        QueueListener(self.queue, writer).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """See QueueHandler."""
        if self.dropped and not self.queue.empty():
            raise queue.Full
        self.report()
        self.queue.put_nowait(record)

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - its name in the standard library
        """Count a line that did not fit. The standard library would print a traceback to stderr, and block there."""
        self.dropped += 1

    def report(self) -> None:
        """Log how many lines were dropped, if any."""
        if self.dropped:
            lines, self.dropped = self.dropped, 0
            log.error("log lines dropped", lines=lines)

    def close(self) -> None:
        """Do nothing, because logging.shutdown must not wait for the thread. See :func:`flush_background`."""


_background: _Background | None = None


def log_in_background() -> None:
    """From now on write logs in a thread, so that a slow reader of stderr blocks no caller. It buffers 5,000."""
    global _background  # noqa: PLW0603 - one for the life of the process: two would mix their lines
    _background = _Background(5_000)


def flush_background() -> None:
    """Wait until all lines are written, for at most 0.3 s: the daemon has 10 s to stop, and needs up to 8.5 before."""
    _limited.report()
    if _background is None:
        return
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        if not _background.queue.unfinished_tasks:
            if not _background.dropped:
                return
            _background.report()
        time.sleep(0.005)


def configure(
    form: Literal["auto", "json", "console"],
    level: Literal["debug", "info", "warning", "error"],
    stream: TextIO | None = None,
) -> None:
    """Send every log of this process to ``stream`` (stderr). A later call changes format and level immediately, even
    for existing loggers. ``auto`` means console format on a terminal, else JSON."""
    terminal = (stream or sys.stderr).isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        clean_values,
        _ordered,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(ensure_ascii=False)
        if form == "json" or (form == "auto" and not terminal)
        else structlog.dev.ConsoleRenderer(colors=terminal, pad_event_to=24, sort_keys=False)
    )
    handler: logging.Handler = _background if _background and stream is None else logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    threshold = getattr(logging, level.upper())
    root.setLevel(threshold)
    for library in _LIBRARIES:
        logging.getLogger(library).setLevel(max(threshold, logging.WARNING))
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(logging.CRITICAL)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _limited,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # A cached logger would keep its old level after SIGHUP.
    )
