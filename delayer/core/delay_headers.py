"""Read delays and due times from a message's headers, in whole milliseconds. Pure.

Values round up, such as half a millisecond of a float or the fourth digit of an RFC 3339 fraction, so nothing is early.
Intake, release, imports and audit all use these functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from typing import Final, NamedTuple, Protocol

from delayer.amqp.values import Timestamp
from delayer.core.marks import LAST_DUE, RECEIVED_AT, received_ms
from delayer.core.readable import TOO_LONG

_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?", re.ASCII)
# RFC 3339 section 5.6, with the lower-case letters and the space that its notes allow.
_RFC3339 = re.compile(
    r"(?P<year>\d{4})(?P<rest>-\d\d-\d\d[Tt ](?:[01]\d|2[0-3]):\d\d):(?P<second>\d\d)(?:\.(?P<fraction>\d{1,30}))?"
    r"(?P<zone>[Zz]|[+-]\d\d:\d\d)",
    re.ASCII,
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class UnreadableDelay(ValueError):
    """A header has no readable delay or due time. The text names the expected and the found value."""


def quote_value(value: object) -> str:
    """Shorten a value to one printable line of at most 60 characters, for a reason."""
    try:
        text = ascii(value)
    except ValueError:
        text = TOO_LONG
    return text if len(text) <= 60 else text[:57] + "..."


def read_delay_ms(value: object, unit: str = "milliseconds") -> int:
    """Read a delay in ``unit``, rounded up: any AMQP integer, numeric string or float. Raises UnreadableDelay.

    >>> read_delay_ms(1500), read_delay_ms("1500"), read_delay_ms(0.25), read_delay_ms(-3)
    (1500, 1500, 1, -3)
    """
    if type(value) is int:
        return value
    if (number := _number(value)) is None:
        raise UnreadableDelay(f"expected {unit} as an integer, a numeric string or a float, found {quote_value(value)}")
    return math.ceil(number)


def is_mark(delay: object) -> bool:
    """Whether this value of ``x-delay`` marks an earlier delay: any finite number below zero, even in a form in which
    it would be no delay.

    >>> [is_mark(value) for value in (-1000, "-1000", b"-8e3", -0.5, 0, "1000", "soon", None, "-inf")]
    [True, True, True, True, False, False, False, False, False]
    """
    try:
        return -math.inf < float(delay) < 0  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _number(value: object) -> int | float | Decimal | None:
    if type(value) is int:
        return value
    match value:
        case float() if math.isfinite(value):
            return value
        case Decimal() if value.is_finite():
            return value
        case str() if _NUMBER.fullmatch(value):
            return Decimal(value)
    return None


def read_instant_ms(value: object) -> int:
    """Read the due time of ``x-deliver-at`` in epoch ms, rounded up: integer epoch ms, an RFC 3339 string, or an AMQP
    timestamp (seconds). Rejects a numeric string, which could be seconds or ms. Raises UnreadableDelay.

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
        f"found {quote_value(value)}"
    )


def read_utc_ms(value: object) -> int | None:
    """Like :func:`read_instant_ms`, but a string without a zone is UTC, and an unreadable value is None."""
    for spelled in (value, f"{value}Z") if isinstance(value, str) else (value,):
        try:
            return read_instant_ms(spelled)
        except UnreadableDelay:
            continue
    return None


def read_eta_ms(value: object) -> int | None:
    """Read the due time of Celery's ``eta`` in epoch ms, rounded up. Every task has the header; None means no delay. A
    time without a zone is UTC, as with Celery's ``enable_utc``. Raises UnreadableDelay.

    >>> read_eta_ms("1970-01-01T00:00:01.000001"), read_eta_ms("1970-01-01T01:00:02+01:00"), read_eta_ms(None)
    (1001, 2000, None)
    """
    if value is None:
        return None
    due_ms = read_utc_ms(value) if isinstance(value, str) else None
    if due_ms is None:
        raise UnreadableDelay(f"expected an instant in ISO 8601, found {quote_value(value)}")
    return due_ms


def read_due_ms(value: object) -> int:
    """Read the due time of ``x-deliver-at`` in epoch ms. Integers of another unit are rejected: seconds read as
    milliseconds fall in 1970 to 1973, and the message would leave at once. Raises UnreadableDelay."""
    if type(value) is int and (unit := _unit(value)) != "milliseconds":
        raise UnreadableDelay(f"expected epoch milliseconds, found {value}: these are {unit}")
    if isinstance(value, Timestamp) and value >= 10**11:
        raise UnreadableDelay(f"expected seconds in an AMQP timestamp, found {int(value)}: these are {_unit(value)}")
    return read_instant_ms(value)


def read_opt_time_ms(value: object) -> int:
    """Read ``x-opt-delivery-time`` in epoch ms. Rejects strings, which RabbitMQ 4.4 ignores. Raises UnreadableDelay."""
    if isinstance(value, str):
        raise UnreadableDelay(f"expected an instant as integer epoch milliseconds, found text: {quote_value(value)}")
    return read_due_ms(value)


def _unit(value: int) -> str:
    """Guess the unit of an epoch time: the one in which it is a date of the present. A small number may be long past.

    >>> _unit(1_800_000_000), _unit(1_800_000_000_000), _unit(1_800_000_000_000_000), _unit(5)
    ('seconds', 'milliseconds', 'microseconds', 'milliseconds')
    """
    if 10**8 <= value < 10**11:
        return "seconds"
    return "milliseconds" if value < 10**15 else "microseconds" if value < 10**18 else "nanoseconds"


def _rfc3339_ms(text: str) -> int | None:
    found = _RFC3339.fullmatch(text)
    if found is None or int(found["second"]) > 60:
        return None
    # The calendar repeats every 400 years, and Python has no year 0.
    year, ahead = (found["year"], 0) if found["year"] != "0000" else ("0400", 146_097 * 86_400)
    try:
        minute = datetime.fromisoformat(f"{year}{found['rest']}:00{found['zone'].upper()}")
    except ValueError:
        return None
    # A leap second (:60) becomes the first second of the next minute, because epoch time cannot express it.
    seconds = (minute - _EPOCH) // timedelta(seconds=1) + int(found["second"]) - ahead
    return seconds * 1000 + math.ceil(Decimal(f"0.{found['fraction'] or 0}") * 1000)


def whole_seconds_until(due_ms: int, now_ms: int) -> int:
    """Whole seconds until the due time, rounded down, at least 0. The daemon keeps the message for the remainder."""
    return max(0, (due_ms - now_ms) // 1000)


def in_words(milliseconds: int) -> str:
    """Format a delay in readable units: ``268435456 s`` is hard to read. From a minute on it is rounded up to seconds,
    so that what exceeds a limit of whole seconds looks larger.

    >>> in_words(90_061_000), in_words(172_799_994), in_words(1500)
    ('1 day, 1:01:01', '2 days', '1.5 s')
    """
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g} s"
    try:
        return str(timedelta(seconds=-(-milliseconds // 1000))).removesuffix(", 0:00:00")
    except OverflowError:
        return f"{milliseconds // 86_400_000} days"


DELAY: Final = b"x-delay"
DELIVER_AT: Final = b"x-deliver-at"
OPT_DELAY: Final = b"x-opt-delivery-delay"
OPT_TIME: Final = b"x-opt-delivery-time"
LONGEST_TIMER_MS: Final = (1 << 63) // 1_000_000
"""The last safe epoch millisecond in ``x-opt-delivery-time``, in the year 2262. A build of RabbitMQ 4.4 lost the queue
over a time more than 2^63 nanoseconds ahead."""
ROUTING_KEY: Final = b"x-delay-routing-key"
EXCHANGE: Final = b"x-delay-exchange"
KEY: Final = b"x-delay-key"
KEY_MODE: Final = b"x-delay-key-mode"
KEY_CEILING: Final = b"x-delay-key-ceiling"
CANCEL: Final = b"x-delay-cancel"
BY_SQL: Final = b"x-delayer-sql"
"""Marks a message sent by SQL whose ``x-deliver-at`` counts on every route, also if it comes again by AMQP, from the
refused queue."""
REQUEST_HEADERS: Final = frozenset(
    {DELIVER_AT, OPT_DELAY, OPT_TIME, ROUTING_KEY, EXCHANGE, KEY, KEY_MODE, KEY_CEILING, CANCEL, BY_SQL}
)
"""The headers of a request, except ``x-delay``, which stays in the message with its sign flipped."""
ETA: Final = b"eta"


class RequestProperties(Protocol):
    """The message properties that a plan may read, in addition to the headers."""

    @property
    def timestamp(self) -> int | None:
        """The property, in seconds."""

    def short(self, name: str) -> bytes | None:
        """The value of a short-string property, such as ``message_id``."""

    def names(self) -> Sequence[bytes]:
        """The names of all headers."""


class DelayRequest(NamedTuple):
    """A message's request: its origin, and those of its headers in :data:`CONSULTED`, decoded. ``copies`` are the keys
    of ``CC``. ``chance``, 0 to 1, differs from message to message, to spread retries over time."""

    exchange: bytes
    routing_key: bytes
    headers: Mapping[bytes, object]
    properties: RequestProperties
    body: bytes = b""
    copies: frozenset[bytes] = frozenset()
    chance: float = 0.0


Asked = tuple[int | None, int | None]
"""A delay in milliseconds, and a due time in epoch milliseconds. If both are set, the due time wins."""
Source = Callable[[DelayRequest], Asked | None]
"""Reads the delay in one form; None if the message does not have that form. Raises UnreadableDelay."""


def _relative(header: bytes, unit: str = "milliseconds", length_ms: int = 1) -> Source:
    def read(request: DelayRequest) -> Asked | None:
        if header not in request.headers or (header == DELAY and is_mark(request.headers[header])):
            return None
        delay = read_delay_ms(request.headers[header], unit)
        if not delay and header == DELAY and LAST_DUE in request.headers:
            return None  # A release flips the sign of x-delay, and 0 has none.
        return delay * length_ms, None

    return read


def _absolute(header: bytes, read_ms: Callable[[object], int] = read_due_ms) -> Source:
    return lambda request: (None, read_ms(request.headers[header])) if header in request.headers else None


_in_seconds = partial(_relative, unit="seconds", length_ms=1000)
UNITS: Final[Mapping[str, Callable[[bytes], Source]]] = {"ms": _relative, "s": _in_seconds, "rfc3339": _absolute}
"""The readers of a header by its unit: milliseconds, seconds, or a due time as in ``x-deliver-at``."""
OWN_SOURCES: Final[Mapping[str, Source]] = {
    "x-delay": _relative(DELAY),
    "x-deliver-at": _absolute(DELIVER_AT),
    "x-opt-delivery-time": _absolute(OPT_TIME, read_opt_time_ms),
    "x-opt-delivery-delay": _relative(OPT_DELAY),
}
"""The headers of delayer and of AMQP 1.0 publishers, in a route's default order; core/delay_sources.py has all."""
_OTHER_WORDS: Final = frozenset({b"x-relay", b"x-decay"})


@lru_cache(maxsize=4096)
def closest_delay_header(name: bytes) -> bytes | None:
    """Find the request header that this name misspells, in letter case, or by one letter added, missing, wrong, or
    swapped with the next. None if the name is right, or not close to any.

    >>> [closest_delay_header(name) for name in (b"X-Delay", b"x-dealy", b"xdelay", b"X_DELAY", b"x-deliver-att")]
    [b'x-delay', b'x-delay', b'x-delay', b'x-delay', b'x-deliver-at']
    >>> [closest_delay_header(name) for name in (b"x-delay", b"x-relay", b"x-delayed", b"x-delayer-id")]
    [None, None, None, None]
    """
    low = name.lower()
    if name == DELAY or name in REQUEST_HEADERS or low in _OTHER_WORDS:
        return None
    # This takes 4 us; a comparison with each right name took 27.
    right = next((_NEAR[one] for one in _without_a_letter(low) if one in _NEAR), None)
    return right if right is not None and _one_letter_apart(low, right) else None


def _without_a_letter(name: bytes) -> list[bytes]:
    return [name, *(name[:at] + name[at + 1 :] for at in range(len(name)))]


_NEAR: Final = {one: right for right in (DELAY, *REQUEST_HEADERS) for one in _without_a_letter(right)}


def _one_letter_apart(one: bytes, other: bytes) -> bool:
    shorter = min(len(one), len(other))
    same = next((at for at in range(shorter) if one[at] != other[at]), shorter)
    left, right = one[same:], other[same:]
    swapped = right[1:2] + right[:1] + right[2:]
    return left[1:] in (right, right[1:]) or left in (right[1:], swapped)


def due_and_start_ms(asked: Asked, request: DelayRequest, now_ms: int, now_lower_ms: int) -> tuple[int, int]:
    """Return the due time, and the time from which the wait is measured, both in epoch ms."""
    delay_ms, due_ms = asked
    if due_ms is not None:
        return due_ms, now_lower_ms
    if delay_ms is None or delay_ms <= 0:
        # A delay of 0 counts from the lower bound of the clock, which has certainly been reached.
        return now_lower_ms + (delay_ms or 0), now_lower_ms
    stamp = received_ms(request.headers, now_ms) if RECEIVED_AT in request.headers else None
    if stamp is None:
        return now_ms + delay_ms, max(now_ms, now_lower_ms)
    return stamp + delay_ms, now_lower_ms
