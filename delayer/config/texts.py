"""Durations, times, headers and hosts as people write them, and a service's name, for the command line and pages."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from delayer.config.errors import Expected, format_found
from delayer.config.model import Settings
from delayer.config.values import UNITS_MS, duration_ms, within
from delayer.core.readable import instant

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def shift_ms(text: str) -> int:
    """Parse a duration with or without a sign into milliseconds: "30m", "+30m", "-1h". Raises Expected."""
    text = text.strip()
    try:
        return -duration_ms(text[1:]) if text.startswith("-") else duration_ms(text.removeprefix("+"))
    except Expected as wrong:
        raise Expected(f"{wrong}, or the same with a - before it") from None


def instant_ms(text: str, now_ms: int | None = None, zone: tzinfo | None = None) -> int:
    """Parse an RFC 3339 time into epoch ms, rounded up so that no message is early. A date is its midnight in UTC. With
    ``now_ms``, also a duration from now: "2h", "-30m". ``zone`` applies to a time without an offset. Without ``zone``
    such a time is rejected, because it means another instant elsewhere. Raises Expected."""
    if now_ms is not None:
        with suppress(Expected):
            return now_ms + shift_ms(text)
    with suppress(ValueError):
        found = datetime.fromisoformat(text.strip())
        zone = UTC if _DATE.fullmatch(text.strip()) else zone
        if found.tzinfo or zone:
            since = (found if found.tzinfo else found.replace(tzinfo=zone)) - datetime(1970, 1, 1, tzinfo=UTC)
            return -(-since // timedelta(milliseconds=1))
    more = "" if now_ms is None else ", or how long from now, such as 2h or -30m"
    raise Expected(f"an instant with its offset, such as 2031-01-31T08:00:00Z, or a date (in UTC){more}")


def duration_text(amount_ms: int) -> str:
    """Format the shortest text that :func:`duration_ms` reads as ``amount_ms``."""
    for unit in ("d", "h", "m", "s"):
        if amount_ms and amount_ms % UNITS_MS[unit] == 0:
            return f"{amount_ms // UNITS_MS[unit]}{unit}"
    return f"{amount_ms}ms" if amount_ms else "0s"


def target_text(at_ms: int | None, by_ms: int) -> str:
    """End a sentence about a reschedule: " to" the new time, or " by" a duration, with a - if earlier.

    >>> target_text(None, -7_200_000), target_text(1_800_000_000_000, 0)
    (' by -2h', ' to 2027-01-15T08:00:00Z')
    """
    if at_ms is not None:
        return f" to {instant(at_ms)}"
    return f" by {'-' if by_ms < 0 else ''}{duration_text(abs(by_ms))}"


Scalar = str | int | float | bool
LONGEST_NAME: Final = 128
"""Maximum bytes of a header's name. AMQP 0-9-1 does not allow longer names."""
_TYPES: Final[Mapping[str, Callable[[str], Scalar]]] = {
    "str": str, "int": int, "float": float, "bool": {"true": True, "false": False}.__getitem__,
}  # fmt: skip


def check_header(name: str, value: object) -> None:
    """Check that a message can have this header. Raises Expected."""
    try:  # JSON may have half of a surrogate pair, and an argument bytes that are not UTF-8.
        size, _ = len(name.encode()), value.encode() if isinstance(value, str) else b""
    except UnicodeEncodeError:
        raise Expected(f"UTF-8, found something else in {format_found(name)}") from None
    if not 0 < size <= LONGEST_NAME:
        raise Expected(f"names of 1 to {LONGEST_NAME} bytes, found {size}: {format_found(name)}")
    if not isinstance(value, str | int | float):
        raise Expected(f"a string, a number, true or false for {format_found(name)}, found {format_found(value)}")
    # JSON has no other numbers, and the broker closes a connection over them.
    if isinstance(value, float) and not math.isfinite(value):
        raise Expected(f"a finite number for {format_found(name)}, found {value}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Expected(f"an integer of 64 bits for {format_found(name)}, found {format_found(value)}")


def check_headers(value: object) -> Mapping[str, Any]:
    """Check that a message can have these headers. Raises Expected."""
    if not isinstance(value, Mapping):
        raise Expected("a table of headers")
    for name, one in value.items():
        check_header(name, one)
    return value


def read_base64(value: object) -> bytes:
    """Raises Expected."""
    try:
        return base64.b64decode(value if isinstance(value, str) else "?", validate=True)
    except ValueError:
        raise Expected("base64") from None


def typed_header(text: str) -> tuple[str, Scalar]:
    """Parse NAME=VALUE or NAME:TYPE=VALUE. Raises ValueError with the field, the expected and the found value."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"expected NAME=VALUE or NAME:TYPE=VALUE, found {format_found(text)}")
    name, _, kind = name.rpartition(":") if ":" in name else (name, "", "str")
    if not name or kind not in _TYPES:
        raise ValueError(
            f"{name}: expected a TYPE of {', '.join(_TYPES)}, found {kind!r}. A name with a colon needs the type too: "
            f"{name}:{kind}:str={value}"
        )
    try:
        typed = _TYPES[kind](value)
    except (ValueError, KeyError):
        raise ValueError(f"{name}: expected a value of type {kind}, found {format_found(value)}") from None
    try:
        check_header(name, typed)
    except Expected as wrong:
        raise ValueError(f"expected {wrong}") from None
    return name, typed


def is_loopback(host: str) -> bool:
    """Whether a host, as a URL spells it, is on the loopback interface."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def service_of(settings: Settings) -> str:
    """Name the service: all processes of one intake queue of one broker share the name, with any login.

    >>> urls = "amqp://a:b@host/orders", "amqp://host:5672/orders", "amqp://a:b@host/mail"
    >>> one, same, other = (service_of(Settings.model_validate({"broker": {"url": url}})) for url in urls)
    >>> queue = service_of(Settings.model_validate({"broker": {"url": urls[0]}, "intake": {"queue": "other"}}))
    >>> (one == same, one == other, one == queue)
    (True, False, False)
    """
    names = names_of(settings)
    whole = f"{names['broker']} {names['virtual_host']} {settings.intake.queue}"
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def names_of(settings: Settings) -> dict[str, str]:
    """The names that distinguish systems, for every page and ``delayer status``. They never contain a login."""
    urls = [urlsplit(url) for url in settings.broker_url.split(",")]
    places = sorted({f"{url.hostname}:{url.port or (5671 if url.scheme == 'amqps' else 5672)}" for url in urls})
    found = {"label": settings.http.label} if settings.http.label else {}
    found |= {"broker": ", ".join(places), "virtual_host": within(settings.broker_url)}
    if settings.store_url is not None:
        store = urlsplit(settings.store_url)
        host = store.netloc.rpartition("@")[2] or dict(parse_qsl(store.query)).get("host", "localhost")
        found["database"] = f"{unquote(store.path[1:]) or '(default)'} on {unquote(host)}"
    return found
