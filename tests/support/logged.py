"""Captured log entries of structlog and of the standard library in one list; restored logging settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
import structlog.testing

_PLAIN = logging.makeLogRecord({}).__dict__.keys() | {"message"}


class _Entries(logging.Handler):
    """Adds each record as an entry like those of structlog."""

    def __init__(self, entries: list[MutableMapping[str, Any]]) -> None:
        super().__init__()
        self._entries = entries

    def emit(self, record: logging.LogRecord) -> None:
        more = {name: value for name, value in record.__dict__.items() if name not in _PLAIN}
        self._entries.append({**more, "event": record.getMessage(), "log_level": record.levelname.lower()})


@contextmanager
def capture_logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """The entries of delayer's modules in this block."""
    ours = logging.getLogger("delayer")
    level = ours.level
    with structlog.testing.capture_logs() as entries:
        handler = _Entries(entries)
        ours.addHandler(handler)
        ours.setLevel(logging.DEBUG)
        try:
            yield entries
        finally:
            ours.removeHandler(handler)
            ours.setLevel(level)


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Undo, after the block, the logging settings of a command or a daemon in it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
