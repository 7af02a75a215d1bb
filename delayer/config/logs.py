"""Logs: one event name for each thing that happens, one line for each event, and no secret in any of them.

Everybody logs through ``structlog.get_logger(__name__)``; :func:`configure` decides what becomes of it, and sends the
libraries' own logging the same way. Logs go to stderr: stdout belongs to what a command was asked for.

Whatever came from outside (header values, names, the broker's texts) may hold line ends and terminal codes. Values are
cleaned before they are written, so that no message can forge a line of the log.
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Final, Literal, TextIO

import structlog

from delayer.config.errors import readable

__all__ = ["EVENTS", "clean_values", "configure", "finish", "log_in_background", "readable"]

EVENTS: Final[Mapping[str, str]] = {
    # the daemon's life
    "starting": "the configuration is read; connections come next",
    "start refused": "something that a person has to decide first; next_step says what",
    "ready": "broker and topology are there, and the queues are about to be consumed",
    "stopping": "told to stop: nothing new is read, what is in flight is settled",
    "stopped": "everything is settled; with the counts of this process's life",
    "failed": "a bug ended the daemon; with its traceback",
    "part failed too": "beside the failure that ends the daemon, another part failed",
    "stop forced": "a part did not end in time and was cut off; what it had in flight comes again",
    "tasks left behind": "work cut off at the very end did not leave in time and ended with the process, as in a crash",
    "reloaded": "SIGHUP: these keys changed live",
    "reload refused": "SIGHUP: the new configuration cannot be used, the old one stays",
    "restart needed": "SIGHUP: these keys changed too, and act after a restart",
    "mode switched": "SIGHUP: new delays go the other way from now on",
    "loops stalled": "these loops stand still: the watchdog is not fed, and systemd ends the process",
    "notify failed": "systemd did not hear of a change of state",
    "notify socket unusable": "NOTIFY_SOCKET is of a kind that is not spoken here; systemd hears nothing",
    "log lines dropped": "whoever reads the log stood still: so many lines are missing here; the daemon went on",
    "http served": "health and metrics are to be had at these addresses",
    "http not served": "the address of [http] listen could not be had; the daemon works, and it is tried again",
    # the broker
    "broker connected": "a connection of the hot path stands",
    "broker unreachable": "connecting failed and is tried again by itself; said at first, then at growing intervals",
    "broker connection lost": "a connection broke; it is opened again by itself",
    "broker blocked": "a resource alarm of the broker (memory, disk): it takes no publishes, so nothing is released",
    "broker unblocked": "the alarm is over: what is due goes out",
    "publish channel closed": "the broker closed a publishing channel for one of in_doubt publishes: it is looked for",
    "no isolation connection": "the broker let in no second connection for publishes that went wrong",
    "isolation interrupted": "a batch has publishes whose outcome is not known: they are repeated",
    "destination silent": "destinations did not confirm in time; the messages for all but the unproven ones are held",
    "consumer cancelled by the broker": "the queue went away or moved; consuming begins again",
    "consumer not ended in order": "a session's end got no answer; its last messages may be repeated",
    "consuming": "a queue is consumed",
    "consuming interrupted": "a loss ended a session; unsettled deliveries went back to the queue, and it begins again",
    "deliveries given back": "what was read could not be carried out in time; the rest is in the queue, and read again",
    "takeover stopped": "a message of another system's level came again and again: that level is left to the broker",
    # the store
    "store shared": "daemons of another broker or virtual host own these lanes: each may publish the other's messages",
    "store connected": "connected, and the schema is the right one",
    "store unreachable": "connecting failed and is tried again by itself; said at first, then at growing intervals",
    "lane taken": "this process owns the lane: it releases from it, and parks into it unless it is a route's",
    "lane dropped": "a lane is free for another process: it is above our share, or our broker is away",
    "no lane": "there are more processes than lanes, so this one does not consume",
    "lane lost": "the lane's lock is gone: releasing from it stopped at once",
    "lane given up": "the lane is left to others",
    "lane connection broken": "the connection that holds a lane's lock broke",
    "rollback failed": "a transaction could not be rolled back by word; its connection is gone, and so is it",
    "release interrupted": "a release was rolled back: its rows wait again",
    "partition made": "a day's partition was made",
    "partition not made": "a day's partition could not be made; its rows go to the default one",
    "partition dropped": "an empty partition was dropped: its day has passed, or its rows were compacted",
    "partition not dropped": "an empty partition could not be dropped; it is tried again",
    "partition not vacuumed": "a compaction could not vacuum a partition, as somebody else held it; the next one does",
    "segment restored": "the messages of a segment wait in a lane again, ahead of the first one's due time",
    "restoring interrupted": "no segment could be restored just now; it is tried again; said at growing intervals",
    # messages that need somebody's attention
    "segment broken": "a segment does not read back: its bytes are kept; at starts and hourly again, as a warning",
    "reply not confirmed": "the broker did not confirm the reply to a cancel; the cancel stands",
    "message refused": "set aside in the refused queue, with the reason",
    "refused acted on": "somebody retried or dropped refused messages over HTTP, and no store has a trail to say it in",
    "message held": "its destination did not take it: it waits in the store, the cascade or the strays queue",
}
"""What every event means. A test compares this table with the code."""

_DEEPEST = 6
# What these report below a warning is about themselves, and at debug level it is whole frames: bodies, and the login.
_LIBRARIES = ("aio_pika", "aiormq", "pamqp", "alembic", "sqlalchemy", "asyncio")
# They log, with tracebacks, what they also raise or what the next caller meets: we say so in better words, and once.
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
    """Processor: everything in the event readable, on one line, and without passwords."""
    for key, value in event.items():
        if key == "exception" and isinstance(value, str):
            # A traceback keeps its lines; indented, none of them can pass for an event of its own.
            event[key] = readable(value, keep_lines=True).replace("\n", "\n    ")
        elif not key.startswith("_"):
            event[key] = _clean(value)
    return event


def _stamp(_logger: object, _method: str, event: Event) -> Event:
    event["timestamp"] = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return event


def _ordered(_logger: object, _method: str, event: Event) -> Event:
    first = {name: event.pop(name) for name in ("timestamp", "level", "event", "logger") if name in event}
    return {**first, **event}


class _Background(QueueHandler):
    """A bounded queue of formatted lines. A thread writes them to stderr, and may wait there for the reader.

    A pipe that has no reader takes 64 KiB; the writer of the next line waits, as long as the reader likes. When the
    queue is full the handler drops lines and counts them, until the thread has written all others: one gap, and behind
    it a line with the count.
    """

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
        """Count a line that found no room; the standard library would print a traceback to stderr, and wait there."""
        self.dropped += 1

    def report(self) -> None:
        """Log how many lines were dropped, if any were."""
        if self.dropped:
            lines, self.dropped = self.dropped, 0
            log.error("log lines dropped", lines=lines)

    def close(self) -> None:
        """Nothing: logging.shutdown must not wait for the thread. See :func:`finish`."""


_background: _Background | None = None


def log_in_background(lines: int = 5_000) -> None:
    """From now on a reader of stderr that stands still stops no caller: at most ``lines`` lines wait for it."""
    global _background  # noqa: PLW0603 - one for the life of the process: two would mix their lines
    _background = _Background(lines)


def finish(seconds: float = 0.3) -> None:
    """At the end of the process: wait for the lines that still wait, but no longer than these seconds.

    The daemon promises to stop within ten seconds, and everything else takes 8.5 at most.
    """
    if _background is None:
        return
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not _background.queue.unfinished_tasks:
            if not _background.dropped:
                return
            _background.report()
        time.sleep(0.005)


def configure(
    form: Literal["json", "console"], level: Literal["debug", "info", "warning", "error"], stream: TextIO | None = None
) -> None:
    """Send every log of this process to ``stream`` (stderr). A second call changes format and level at once, also for
    loggers that exist already."""
    coloured = (stream or sys.stderr).isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        _stamp,
        structlog.processors.format_exc_info,
        clean_values,
        _ordered,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(ensure_ascii=False)
        if form == "json"
        else structlog.dev.ConsoleRenderer(colors=coloured, pad_event_to=24, sort_keys=False)
    )
    handler: logging.Handler = _background if _background and stream is None else logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
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
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # a cached logger would keep its old level after SIGHUP
    )
