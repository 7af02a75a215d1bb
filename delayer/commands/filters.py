"""What the verbs that look and act share: options that say which messages are meant, and how they are printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from delayer.commands.common import instant_ms
from delayer.core.filters import Filter, Token, read_token
from delayer.services import reading
from delayer.settings import duration_ms
from delayer.store.listing import Entry

F = TypeVar("F", bound=Callable[..., Any])
EARLIEST_MS = -62_135_596_800_000  # the year 1, where Python's calendar begins


def bytes_of(_context: click.Context, _option: click.Parameter, text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")


def instant(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """Epoch milliseconds, from RFC 3339, or from how long from now."""
    if text is None:
        return None
    try:
        sign, amount = (-1, text[1:]) if text.startswith("-") else (1, text)
        return time.time_ns() // 1_000_000 + sign * duration_ms(amount)
    except ValueError:
        pass
    found = instant_ms(text)
    if found is None:
        raise click.BadParameter(
            "expected an instant with its offset, such as 2031-01-31T08:00:00Z, a date (in UTC), or how long from now, "
            f"such as 2h or -30m, found {text!r}"
        )
    return found


def _headers(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> tuple[tuple[bytes, str], ...]:
    pairs = []
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, found {text!r}")
        pairs.append((name.encode("utf-8", "surrogateescape"), value))
    return tuple(pairs)


def _tokens(_context: click.Context, _argument: click.Parameter, given: tuple[str, ...]) -> tuple[Token, ...]:
    found, wrong, expected = [], [], ""
    for text in given:
        try:
            found.append(read_token(text))
        except ValueError as error:
            wrong.append(repr(text))
            expected = str(error)
    if wrong:
        raise click.BadParameter(f"expected {expected}; found {', '.join(wrong)}")
    return tuple(found)


_OPTIONS = (
    click.option("--route", callback=bytes_of, metavar="EXCHANGE", help="The `from` exchange of the route it came by."),
    click.option("--to", "exchange", callback=bytes_of, metavar="EXCHANGE", help="The exchange it goes to."),
    click.option("--to-key", "routing_key", callback=bytes_of, metavar="KEY", help="The routing key it goes out with."),
    click.option(
        "--due-after", "due_from_ms", callback=instant, metavar="INSTANT", help="Due then or later: RFC 3339, or 2h."
    ),
    click.option("--due-before", "due_before_ms", callback=instant, metavar="INSTANT", help="Due before then."),
    click.option("--key", callback=bytes_of, metavar="KEY", help="The x-delay-key that stands for it."),
    click.option(
        "--header", "headers", multiple=True, callback=_headers, metavar="NAME=VALUE",
        help="A header equals this, as text. May be repeated.",
    ),
)  # fmt: skip

tokens = click.argument("tokens", nargs=-1, callback=_tokens, metavar="[ID]...")
limit_option = click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Rows of a page."
)


def filter_options(command: F) -> F:
    """The options of a Filter; the command gets them by the names of its fields."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def filter_of(given: dict[str, Any]) -> Filter:
    """The Filter of what :func:`filter_options` gave."""
    return Filter(**{name: given[name] for name in Filter.__dataclass_fields__})


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


def row_of(entry: Entry) -> tuple[object, ...]:
    """One line of a list."""
    key = "" if entry.key is None else reading.text(entry.key)
    where = "" if entry.place.segment is None else f"segment {entry.place.segment}"
    return (
        str(entry.place.token),
        iso(entry.place.due_us // 1000),
        reading.text(entry.route),
        address(entry.to_exchange, entry.to_key),
        entry.size,
        key,
        where,
    )


def json_of(entry: Entry) -> dict[str, Any]:
    """The same for programs."""
    said = reading.read(entry.properties)
    return {
        "id": str(entry.place.token),
        "due_ms": entry.place.due_us // 1000,
        "parked_ms": entry.parked_ms,
        "lane": entry.place.lane,
        "segment": entry.place.segment,
        "route": reading.text(entry.route),
        "exchange": reading.text(entry.exchange),
        "routing_key": reading.text(entry.routing_key),
        "to_exchange": reading.text(entry.to_exchange),
        "to_key": reading.text(entry.to_key),
        "key": None if entry.key is None else reading.text(entry.key),
        "body_bytes": entry.size,
        "properties": said.properties,
        "headers": [one._asdict() for one in said.headers],
        "broken": said.broken or None,
    }
