"""Logs: one event name for each thing that happens, one line for each event, and no secret in any of them.

Everybody logs through ``structlog.get_logger(__name__)``; :func:`configure` decides what becomes of it, and sends the
libraries' own logging the same way. Logs go to stderr: stdout belongs to what a command was asked for.

Whatever came from outside (header values, names, the broker's texts) may hold line ends and terminal codes. Values are
cleaned before they are written, so that no message can forge a line of the log.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

import structlog

from delayer.settings import mask

EVENTS: Final[Mapping[str, str]] = {}

_LONGEST_BYTES = 512
_LONGEST_TEXT = 16_384
_DEEPEST = 6
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_UNPRINTABLE_BUT_LINES = re.compile(r"[^\x20-\x7e\n\t]")
# What these report below a warning is about themselves; at debug level that is wanted, at info it is noise.
_LIBRARIES = ("aio_pika", "aiormq", "pamqp", "alembic", "sqlalchemy", "asyncio")

Event = MutableMapping[str, Any]


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def readable(value: str | bytes | bytearray | memoryview, *, keep_lines: bool = False) -> str:
    """One printable line: bytes that are no UTF-8 and characters that do not print as escapes, passwords masked."""
    if isinstance(value, bytes | bytearray | memoryview):
        whole = bytes(value)
        rest = len(whole) - _LONGEST_BYTES
        value = whole[:_LONGEST_BYTES].decode("utf-8", "backslashreplace") + (f"… ({rest} more bytes)" * (rest > 0))
    elif len(value) > _LONGEST_TEXT:
        value = value[:_LONGEST_TEXT] + f"… ({len(value) - _LONGEST_TEXT} more characters)"
    value = mask(value)
    return (_UNPRINTABLE_BUT_LINES if keep_lines else _UNPRINTABLE).sub(_escape, value)


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


def configure(
    form: Literal["json", "console"], level: Literal["debug", "info", "warning", "error"], stream: TextIO | None = None
) -> None:
    """Send every log of this process to ``stream`` (stderr). Called again, it takes over at once, also for loggers
    that exist already: that is how SIGHUP changes format and level."""
    stream = stream or sys.stderr
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
        else structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=24, sort_keys=False)
    )
    handler = logging.StreamHandler(stream)
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
        logging.getLogger(library).setLevel(threshold if level == "debug" else max(threshold, logging.WARNING))
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
