"""What every verb needs: the settings, errors that name the next step, tables for people and JSON for programs."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

import click

from delayer import settings as configuration
from delayer.commands import tables
from delayer.core import certificates
from delayer.core.plain_json import escaped
from delayer.settings import Settings
from delayer.settings.readable import readable

DONE, FOUND, USAGE, OUT_OF_REACH = 0, 1, 2, 3
"""The exit codes: done; a check found something; usage or configuration; broker or store out of reach."""

BROKER_RUNS = "check broker.url, and that the broker runs"
BROKER_RIGHTS = "check user, password, vhost and permissions"
STORE_RUNS = "check store.url, and that Postgres runs"
"""Advice for who is out of reach."""


def broker_advice(lost: Exception) -> str:
    """What to do about a broker that is out of reach for this reason."""
    return certificates.advice(str(lost), *certificates.BROKER) or BROKER_RUNS


_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
WIDTH_WITHOUT_TERMINAL = tables.WIDTH_WITHOUT_TERMINAL


@dataclass(frozen=True, slots=True)
class Request:
    """The options before the verb. Settings are read when a verb asks for them, so that ``--help`` never fails."""

    config: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    def settings(self, sealed: list[str] | None = None) -> Settings:
        """``sealed`` as for load. Raises ConfigError."""
        return configuration.load(self.config, os.environ, self.flags, sealed)

    @property
    def file(self) -> Path | None:
        return configuration.config_file(self.config, os.environ)


def request_of(context: click.Context) -> Request:
    """What the group put there before the verb was called."""
    request = context.find_object(Request)
    assert request is not None
    return request


class Failure(click.ClickException):
    """An expected error: a message without a traceback. The subclasses have the exit codes."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"delayer: {self.message}", file=file, err=True)


class Off(Failure):
    """Something is not as it should be."""

    exit_code = FOUND


class Misused(Failure):
    """Usage or configuration."""

    exit_code = USAGE


class Unreached(Failure):
    """Broker or store out of reach."""

    exit_code = OUT_OF_REACH


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


def instant_ms(text: str) -> int | None:
    """Epoch milliseconds of RFC 3339, rounded up: never early; of a date alone, its midnight in UTC. None for a text
    that is neither, or has no offset: 8 o'clock is another instant elsewhere."""
    try:
        found = datetime.fromisoformat(f"{text}T00:00:00Z" if _DATE.fullmatch(text) else text)
    except ValueError:
        return None
    if found.tzinfo is None:
        return None
    since = found - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1000 + -(-since.microseconds // 1000)


def roughly(seconds: int) -> str:
    """So long, for people: the largest unit that there are two of."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
