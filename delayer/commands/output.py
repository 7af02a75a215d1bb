"""Output of the commands: JSON for programs; tables, notes and instants for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import click

from delayer.commands import tables
from delayer.core.plain_json import escaped
from delayer.services import reading
from delayer.settings.errors import readable

WIDTH_WITHOUT_TERMINAL = tables.WIDTH_WITHOUT_TERMINAL


def print_json(value: object) -> None:
    """One JSON document on stdout, and nothing else there."""
    click.echo(escaped(json.dumps(value, indent=2, ensure_ascii=False, default=_plain)))


def _plain(value: object) -> object:
    return readable(value) if isinstance(value, bytes) else str(value)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> None:
    """A table on stdout. ``right``: the columns with numbers. Nothing in a cell is taken for markup."""
    tables.show(columns, [[readable(str(cell)) for cell in row] for row in rows], frozenset(right))


def note(text: str) -> None:
    """A remark for people, on stderr."""
    click.echo(readable(text), err=True)


def quoted(name: str) -> str:
    return f'"{readable(name)}"'


def depth_text(depth: int | None, *, used: bool = True, hidden: bool = False) -> str:
    """How many messages are in a queue; ``used``: whether this configuration needs it at all; ``hidden``: the broker
    does not show it to this user."""
    if depth is None and used:
        return "hidden from this user" if hidden else "missing"
    if depth is None:
        return "not used in store mode"
    return str(depth)


def when(due_ms: int | None, now_ms: int | None = None) -> str:
    """An instant for people: in UTC, and how far away it is."""
    if due_ms is None:
        return "-"
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    try:
        instant = datetime.fromtimestamp(due_ms // 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        instant = f"{due_ms} ms"  # beyond the calendar
    seconds = abs(due_ms - now_ms) // 1000
    return f"{instant} ({'overdue by' if due_ms < now_ms else 'in'} {roughly(seconds)})"


def roughly(seconds: int) -> str:
    """So long, for people: the largest unit that there are two of."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def iso(at_ms: int) -> str:
    """An instant in UTC, to the millisecond; beyond the calendar, the number."""
    try:
        whole = datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return f"{whole}.{at_ms % 1000:03d}Z"


def address(exchange: bytes, routing_key: bytes) -> str:
    """A destination: the exchange and the key, or the queue."""
    key = reading.text(routing_key)
    return f"{reading.text(exchange)} / {key}" if exchange else f"queue {key}"


class Progress:
    """How far it is, on one line of a terminal."""

    def __call__(self, done: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{done:,} …", err=True, nl=False)
