"""Delays and due times from a message's headers or body, in whole milliseconds. Pure.

All values round up, so nothing is ever early. Examples: half a millisecond of a float delay, the fourth digit of an RFC
3339 fraction. Intake, release, imports and audit all use these functions.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

from delayer.core.message import Timestamp

_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?", re.ASCII)
# RFC 3339 section 5.6, with the lower-case letters and the space that its notes allow.
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,30}))?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()


class UnreadableDelay(ValueError):
    """A header has no readable delay or due time. The text tells the expected and the found value."""


def shown(value: object) -> str:
    """A value for a reason: short, printable, on one line."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_delay_ms(value: object) -> int:
    """The relative delay of ``x-delay`` in ms, rounded up. It may be any AMQP integer, a numeric string, or a float.

    >>> read_delay_ms(1500), read_delay_ms("1500"), read_delay_ms(0.25), read_delay_ms(-3)
    (1500, 1500, 1, -3)

    Raises UnreadableDelay.
    """
    if type(value) is int:
        return value
    match value:
        case float() if math.isfinite(value):
            return math.ceil(value)
        case Decimal() if value.is_finite():
            return math.ceil(value)
        case str() if _NUMBER.fullmatch(value):
            return math.ceil(Decimal(value))
    raise UnreadableDelay(f"expected milliseconds as an integer, a numeric string or a float, found {shown(value)}")


def read_instant_ms(value: object) -> int:
    """The due time of ``x-deliver-at`` in epoch ms, rounded up.

    It may be integer epoch milliseconds, an RFC 3339 string, or an AMQP timestamp (seconds). A numeric string is
    refused, because it could mean seconds or milliseconds. Raises UnreadableDelay.

    >>> read_instant_ms("1970-01-01T00:00:01.0001Z"), read_instant_ms(Timestamp(7))
    (1001, 7000)
    """
    match value:
        case bool():
            pass
        case Timestamp():
            return int(value) * 1000
        case int():
            return value
        case str():
            instant = _rfc3339_ms(value)
            if instant is not None:
                return instant
    raise UnreadableDelay(
        "expected an instant as integer epoch milliseconds, an RFC 3339 string with its offset (Z, +01:00) or an AMQP "
        "timestamp, "
        f"found {shown(value)}"
    )


def read_utc_ms(value: object) -> int | None:
    """The same, where a text without a zone is UTC. None for an unreadable value."""
    for spelled in (value, f"{value}Z") if isinstance(value, str) else (value,):
        try:
            return read_instant_ms(spelled)
        except UnreadableDelay:
            continue
    return None


def read_delivery_time_ms(value: object) -> int:
    """The due time of ``x-opt-delivery-time`` in epoch ms. Integers that can only be seconds are refused: in
    milliseconds they are in 1970 to 1973, and the message would leave at once. Raises UnreadableDelay.
    """
    if type(value) is int and 10**8 <= value < 10**11:
        raise UnreadableDelay(f"expected epoch milliseconds, found {value}: these are seconds")
    return read_instant_ms(value)


def _rfc3339_ms(text: str) -> int | None:
    found = _RFC3339.fullmatch(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    fraction, sign, off_hour, off_minute = found.groups()[6:]
    # A leap second (:60) is the first second of the next minute, since epoch time has no other value for it.
    if hour > 23 or minute > 59 or second > 60:
        return None
    try:  # The calendar repeats after 400 years, and Python has no year 0.
        days = date(year or 400, month, day).toordinal() - _EPOCH_DAY - (0 if year else 146_097)
    except ValueError:
        return None
    offset = 0
    if sign:
        if int(off_hour) > 23 or int(off_minute) > 59:
            return None
        offset = (int(off_hour) * 60 + int(off_minute)) * (60 if sign == "+" else -60)
    seconds = days * 86_400 + hour * 3600 + minute * 60 + second - offset
    return seconds * 1000 + (math.ceil(Decimal("0." + fraction) * 1000) if fraction else 0)


def seconds_until(due_ms: int, now_ms: int) -> int:
    """Whole seconds from now to the due time, rounded down; 0 for a due time in the past. The daemon keeps a message
    for the rest of a second."""
    return max(0, (due_ms - now_ms) // 1000)


def in_words(milliseconds: int) -> str:
    """A delay in readable units: people cannot read ``268435456 s``.

    >>> in_words(90_061_000), in_words(172_800_000), in_words(1500)
    ('1 day, 1:01:01', '2 days', '1.5 s')
    """
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g} s"
    try:
        return str(timedelta(milliseconds=milliseconds)).removesuffix(", 0:00:00")
    except OverflowError:
        return f"{milliseconds // 86_400_000} days"


LONGEST_BODY: Final = 64 << 20
"""The most bytes of an unpacked body: a few kilobytes may unpack to gigabytes."""
_GZIP_ONLY: Final = 16 + zlib.MAX_WBITS
_MISSING: Final = object()


def steps(pointer: str) -> tuple[str, ...]:
    """The parts of a JSON pointer. Raises ValueError if it is not one.

    >>> steps("/nextattempt/time"), steps("/a~1b/~0"), steps("")
    (('nextattempt', 'time'), ('a/b', '~'), ())
    """
    if pointer and not pointer.startswith("/"):
        raise ValueError(f'expected a JSON pointer such as "/nextattempt/time", found {shown(pointer)}')
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


def instant_in_json_ms(body: bytes, pointer: str, encoding: bytes | None = None) -> int | None:
    """The time at the pointer in epoch ms, rounded up; None if there is no value, or null.

    It may be RFC 3339, the same without a zone (UTC), or integer epoch milliseconds. A body that is not JSON is an
    error, because the publisher may have meant a due time. Raises UnreadableDelay.
    """
    value = _at(_parsed(body, encoding), steps(pointer))
    if value is _MISSING or value is None:
        return None
    if (due_ms := read_utc_ms(value)) is None:
        raise UnreadableDelay(
            f"expected an instant in RFC 3339, the same without a zone in UTC, or integer epoch milliseconds, "
            f"found {shown(value)}"
        )
    return due_ms


def _parsed(body: bytes, encoding: bytes | None) -> Any:
    plain = _unpacked(body) if encoding is not None and encoding.lower() in (b"gzip", b"x-gzip") else body
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):  # ValueError includes UnicodeDecodeError and integers of 5,000 digits.
        raise UnreadableDelay(f"expected a JSON body, found {shown(plain[:40])}") from None


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP_ONLY)
    try:
        plain = unpacking.decompress(body, LONGEST_BODY)
    except zlib.error as error:
        raise UnreadableDelay(f"expected a body in gzip, found other bytes: {error}") from error
    if not unpacking.eof:
        raise UnreadableDelay(
            f"expected a whole body in gzip of at most {LONGEST_BODY} bytes, found a longer or a cut one"
        )
    return plain


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isascii() and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return _MISSING
    return value


DELAY: Final = b"x-delay"
DELIVER_AT: Final = b"x-deliver-at"
OPT_DELAY: Final = b"x-opt-delivery-delay"
OPT_TIME: Final = b"x-opt-delivery-time"
LONGEST_TIMER_MS: Final = (1 << 63) // 1_000_000
"""The last epoch millisecond, in the year 2262, that is safe in ``x-opt-delivery-time``: a build of RabbitMQ 4.4 lost
the queue by a time of more than 2^63 nanoseconds ahead."""
ROUTING_KEY: Final = b"x-delay-routing-key"
EXCHANGE: Final = b"x-delay-exchange"
KEY: Final = b"x-delay-key"
CANCEL: Final = b"x-delay-cancel"
RECEIVED_AT: Final = b"timestamp_in_ms"
LAST_DUE: Final = b"x-delayer-due"

RELATIVE: Final = {"x-delay": DELAY, "x-opt-delivery-delay": OPT_DELAY}
ABSOLUTE: Final = {"x-deliver-at": DELIVER_AT, "x-opt-delivery-time": OPT_TIME}
HEADERS: Final = RELATIVE | ABSOLUTE
TIMESTAMP: Final = "timestamp"
NSERVICEBUS: Final = "nservicebus"
NSERVICEBUS_TIMEOUT: Final = "nservicebus-timeout"
ROUTING_KEY_BITS: Final = "routing-key-bits"
CELERY_ETA: Final = "celery-eta"
JSON: Final = "json:"
"""The prefix of a form that continues with a JSON pointer into the body."""
DELAY_FORMS: Final = (
    *RELATIVE, *ABSOLUTE, TIMESTAMP, NSERVICEBUS, NSERVICEBUS_TIMEOUT, ROUTING_KEY_BITS, CELERY_ETA,
)  # fmt: skip
"""All forms with a fixed name."""
DEFAULT_FORMS: Final = ("x-delay", "x-deliver-at", "x-opt-delivery-time", "x-opt-delivery-delay")


class DelayRequest(NamedTuple):
    """A message's request: its origin, and its decoded headers out of :data:`CONSULTED`.

    ``timestamp`` is the property, in seconds. ``copies`` are the keys of ``CC``.
    ``chance``, 0 to 1, differs from message to message, and spreads retries over time.
    """

    exchange: bytes
    routing_key: bytes
    headers: Mapping[bytes, object]
    timestamp: int | None = None
    copies: frozenset[bytes] = frozenset()
    body: bytes = b""
    content_encoding: bytes | None = None
    message_id: bytes | None = None
    chance: float = 0.0


def is_form(name: object) -> bool:
    """Whether ``name`` is a valid value of ``delay_from``."""
    if not isinstance(name, str) or not name.startswith(JSON):
        return name in DELAY_FORMS
    try:
        steps(name.removeprefix(JSON))
    except ValueError:
        return False
    return True


def counted(delay_ms: int, request: DelayRequest, now_ms: int, now_lower_ms: int) -> tuple[int, int]:
    """The due time of a relative delay, and the time from which it counts, both in epoch ms."""
    if delay_ms <= 0:
        # A delay of 0 means the lower bound of the clock: the time now_lower_ms has certainly been reached.
        return now_lower_ms + delay_ms, now_lower_ms
    stamp = _received_ms(request) if RECEIVED_AT in request.headers else None
    if stamp is None:
        return now_ms + delay_ms, max(now_ms, now_lower_ms)
    return stamp + delay_ms, now_lower_ms


def _received_ms(request: DelayRequest) -> int | None:
    """The broker's ``timestamp_in_ms``, if usable: a relative delay counts from it, so that a wait in the intake queue
    does not add up. None: the delay counts from now.

    A message that was delayed before may carry the stamp of its first arrival, because the broker's interceptor does
    not overwrite by default. A delay from that time would be too short.
    """
    stamp = request.headers[RECEIVED_AT]
    if LAST_DUE in request.headers or not isinstance(stamp, int) or isinstance(stamp, bool | Timestamp) or stamp <= 0:
        return None
    return stamp
