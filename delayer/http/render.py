"""HTML by Jinja2, with everything escaped; and the page's wording, numbers and instants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from shlex import quote
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import jinja2
from starlette.responses import HTMLResponse

from delayer import __version__
from delayer.core import horizon
from delayer.core.message import as_text
from delayer.core.readable import duration, format_relative_time, instant, size
from delayer.core.units import HOUR_MS
from delayer.format import reading
from delayer.format.reading import message_id, preview, route_text, value_text
from delayer.http.recent import host_ms
from delayer.http.view import DaemonState
from delayer.store.admin.census import COMPACTED, NONE_THERE, Census

_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
"""Invisible characters and those that turn the direction of text; the page shows their code points."""


SHOWN: Final = 40
"""Maximum number of a message's properties and headers on the page."""
LONGEST: Final = 300
SOON_MS: Final = 30_000
"""What should have come within this time comes now."""


def ahead(at_ms: int | None, now_ms: int | None = None) -> str:
    """Format how far off an instant is, from ``now_ms`` or from this host's clock."""
    return format_relative_time(at_ms, host_ms() if now_ms is None else now_ms)


def upcoming(at_ms: int, now_ms: int | None = None) -> str:
    """The same for what comes next: its look may be some seconds old. A page script agrees."""
    late_ms = (host_ms() if now_ms is None else now_ms) - at_ms
    return "now" if 0 < late_ms < SOON_MS else ahead(at_ms, now_ms)


def number(value: float | None) -> str:
    """Format a number with thin spaces between thousands."""
    return "–" if value is None else f"{value:,.0f}".replace(",", "\u202f")


def rate(value: float) -> str:
    return f"{value:.1f}" if 0 < value < 10 else number(value)


def name(raw: bytes | str | None) -> str:
    """Format a name from AMQP, with its invisible characters as code points."""
    if raw is None:
        return ""
    text = raw if isinstance(raw, str) else as_text(raw)
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def address(exchange: bytes, routing_key: bytes) -> str:
    """Format a destination: the exchange and the key, or the queue."""
    return name(reading.address(exchange, routing_key))


def properties(raw: bytes) -> list[tuple[str, str]]:
    """List a message's first properties and headers with their values, which are cut after LONGEST characters."""
    read = reading.decode_properties(raw, whole=False)
    found = [*read.properties.items(), *((f"{header.name} ({header.type})", header.value) for header in read.headers)]
    texts = [(name, value_text(value)) for name, value in found[:SHOWN]]
    shown = [(name, text[:LONGEST] + "…" * (len(text) > LONGEST)) for name, text in texts]
    shown += [("…", "more: `delayer refused list --json`")] if len(found) > SHOWN or read.left_out else []
    return shown + ([("not readable", read.broken)] if read.broken else [])


def query(given: Mapping[str, Any], **more: Any) -> str:
    """Build a query string without empty values."""
    return urlencode({key: value for key, value in {**given, **more}.items() if value not in ("", None)})


ENVIRONMENT: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("delayer.http"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
for function in (
    instant, ahead, upcoming, duration, number, rate, size, name, address, query, properties, preview, message_id,
    quote, as_text, value_text, route_text,
):  # fmt: skip
    ENVIRONMENT.filters[function.__name__] = function
    ENVIRONMENT.globals[function.__name__] = function
ENVIRONMENT.globals["version"] = __version__


def html(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(ENVIRONMENT.get_template(template).render(values), status_code=status)


MOST_ROWS: Final = 20
"""Number of destinations that the overview lists for each ranking."""


class DestinationRow(NamedTuple):
    """A destination on the overview. ``rate``: messages per second that this daemon released to it."""

    exchange: bytes
    routing_key: bytes
    waiting: float
    next_due_ms: int | None
    held: int
    rate: float


TITLES: Final = {"minutes": "The coming hour", "hours": "Two days", "days": "Two months", "months": "Two years"}


def blocked(state: DaemonState) -> bool:
    """Whether the broker has blocked a connection of this process."""
    return any(line.blocked for line in state.connections.values())


def series(census: Census | None) -> list[dict[str, Any]]:
    """Build the backlog's charts: titles, and a table row for each bar that is not empty."""
    counts = {} if census is None else census.together()
    found = []
    for one in horizon.SERIES:
        bars = horizon.bars(counts, one)
        ends = [duration(at * one.step / 1000) for at in range(1, len(bars) + 1)]
        spans = [f"within {ends[0]}", *(f"in {first} to {last}" for first, last in pairwise(ends))]
        rows = [(span, count) for span, count in zip(spans, bars, strict=True) if count]
        found.append({"name": one.name, "title": TITLES[one.name], "rows": rows})
    return found


def routes(census: Census, configured: Iterable[bytes]) -> list[tuple[bytes, float, float, int]]:
    """Count each route's messages: waiting, due within an hour, and held. Pure."""
    last, waiting = horizon.OFFSETS.index(HOUR_MS), census.by_route()
    found = []
    for route in {*configured, *waiting, *census.held}:
        of = waiting.get(route, {})
        soon = sum(count for bucket, count in of.items() if bucket <= last)
        found.append((route, sum(of.values()), soon, census.held.get(route, 0)))
    return sorted(found, key=lambda row: (-row[1], -row[3], row[0]))


def destinations(census: Census, rates: Mapping[tuple[bytes, bytes], float]) -> list[DestinationRow]:
    """List the largest destinations: those with the most waiting, held and released messages. Pure."""
    rows = []
    for to in census.destinations.keys() | rates.keys():
        one = census.destinations.get(to, NONE_THERE)
        rows.append(DestinationRow(*to, one.waiting, one.next_due_ms, one.held, rates.get(to, 0.0)))
    by_name = sorted(rows, key=lambda row: row[:2])
    largest = {
        row for size in ("waiting", "held", "rate") for row in sorted(by_name, key=attrgetter(size))[-MOST_ROWS:]
    }
    return sorted(largest, key=lambda row: (-row.waiting, -row.held, row[:2]))[: 2 * MOST_ROWS]


def destinations_note(census: Census, rows: Sequence[DestinationRow]) -> str:
    """Note below the destinations how they were counted, and what was not."""
    packed = sum(count for (route, _), count in census.counts.items() if route == COMPACTED)
    others = sum(census.together().values()) - packed - sum(row.waiting for row in rows)
    how = "Counted" if census.exact else "Estimated from samples, so a message may be due earlier than this table says;"
    left = f" {number(others)} messages wait for other destinations." if others >= 1 else ""
    left += f" {number(packed)} compacted messages are not counted here." if packed else ""
    return f"{how} at {instant(census.taken_ms)}. Rates are those of this daemon.{left}"


def backlog_note(census: Census | None, error: str) -> str:
    """Write the note below the backlog's charts."""
    if census is None:
        return f"Not counted yet: {error}" if error else "Not counted yet."
    counts = census.together()
    classes, total = horizon.by_class(counts), sum(counts.values())
    how = "Counted" if census.exact else "Estimated from samples"
    return (
        f"{how} at {instant(census.taken_ms)}: {number(total)} message{'' if total == 1 else 's'}, "
        f"{number(classes['overdue'])} of them overdue, {number(classes[horizon.LATER])} due in more "
        f"than a year.{f' Now: {error}.' if error else ''}"
    )
