"""What a message says, and what it says about time: every form that a route's ``delay_from`` may name. Pure.

The first form present rules, in the route's order. One that is present and unreadable never falls through to the next:
nobody can tell how early that would be.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from delayer.core import nservicebus
from delayer.core.delay import UnreadableDelay, read_delay_ms, read_instant_ms, shown
from delayer.core.levels import ETA, delay_in_key, eta_ms
from delayer.core.values import Timestamp

LONGEST_BODY: Final = 64 << 20
"""Bytes of an unpacked body: a few kilobytes may unpack to gigabytes."""
_GZIP_ONLY: Final = 16 + zlib.MAX_WBITS
_MISSING: Final = object()


def steps(pointer: str) -> tuple[str, ...]:
    """The parts of a pointer. Raises ValueError for what is none.

    >>> steps("/nextattempt/time"), steps("/a~1b/~0"), steps("")
    (('nextattempt', 'time'), ('a/b', '~'), ())
    """
    if pointer and not pointer.startswith("/"):
        raise ValueError(f'expected a JSON pointer such as "/nextattempt/time", found {shown(pointer)}')
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


def instant_in_json_ms(body: bytes, pointer: str, encoding: bytes | None = None) -> int | None:
    """The instant that the pointer leads to, in epoch ms, rounded up; None where there is nothing, or null.

    RFC 3339, the same without a zone (UTC then), or integer epoch milliseconds. A body that is no JSON may have been
    meant to say an instant, so that is not "nothing". Raises UnreadableDelay.
    """
    value = _at(_parsed(body, encoding), steps(pointer))
    if value is _MISSING or value is None:
        return None
    for spelled in (value, f"{value}Z") if isinstance(value, str) else (value,):
        try:
            return read_instant_ms(spelled)
        except UnreadableDelay:
            continue
    raise UnreadableDelay(
        f"expected an instant in RFC 3339, the same without a zone in UTC, or integer epoch milliseconds, "
        f"found {shown(value)}"
    )


def _parsed(body: bytes, encoding: bytes | None) -> Any:
    plain = _unpacked(body) if encoding is not None and encoding.lower() in (b"gzip", b"x-gzip") else body
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError; so is an integer of 5,000 digits
        raise UnreadableDelay(f"expected a JSON body, found {shown(plain[:40])}") from None


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP_ONLY)
    try:
        plain = unpacking.decompress(body, LONGEST_BODY)
    except zlib.error as error:
        raise UnreadableDelay(f"expected a body in gzip, found other bytes: {error}") from error
    if not unpacking.eof:
        raise UnreadableDelay(f"expected a whole body in gzip of at most {LONGEST_BODY} bytes, found more, or less")
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
ROUTING_KEY: Final = b"x-delay-routing-key"
EXCHANGE: Final = b"x-delay-exchange"
KEY: Final = b"x-delay-key"
CANCEL: Final = b"x-delay-cancel"
RECEIVED_AT: Final = b"timestamp_in_ms"
LAST_DUE: Final = b"x-delayer-due"

# The headers that decide() looks at (and, on a route of dead letters, retrying.CONSULTED); a caller need not decode any
# other.
CONSULTED: Final = (
    frozenset({DELAY, DELIVER_AT, OPT_DELAY, OPT_TIME, ROUTING_KEY, EXCHANGE, KEY, CANCEL, RECEIVED_AT, LAST_DUE})
    | frozenset({ETA})
    | nservicebus.CONSULTED
)
RELATIVE: Final = {"x-delay": DELAY, "x-opt-delivery-delay": OPT_DELAY}
ABSOLUTE: Final = {"x-deliver-at": DELIVER_AT, "x-opt-delivery-time": OPT_TIME}
HEADERS: Final = RELATIVE | ABSOLUTE
TIMESTAMP: Final = "timestamp"
NSERVICEBUS: Final = "nservicebus"
NSERVICEBUS_TIMEOUT: Final = "nservicebus-timeout"
ROUTING_KEY_BITS: Final = "routing-key-bits"
CELERY_ETA: Final = "celery-eta"
JSON: Final = "json:"
"""Begins a form that goes on with a JSON pointer into the body."""
DELAY_FORMS: Final = (
    *RELATIVE, *ABSOLUTE, TIMESTAMP, NSERVICEBUS, NSERVICEBUS_TIMEOUT, ROUTING_KEY_BITS, CELERY_ETA,
)  # fmt: skip
"""Every form with a name of its own."""
DEFAULT_FORMS: Final = ("x-delay", "x-deliver-at", "x-opt-delivery-time", "x-opt-delivery-delay")


class Ask(NamedTuple):
    """What a message says: where it came through, and its decoded headers out of :data:`CONSULTED`.

    ``timestamp`` is the property, in seconds. ``copies`` are the keys that ``CC`` names.
    ``chance``, 0 to 1, differs from message to message: what is spread over time is spread by it.
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
    """Whether ``delay_from`` may hold this."""
    if not isinstance(name, str) or not name.startswith(JSON):
        return name in DELAY_FORMS
    try:
        steps(name.removeprefix(JSON))
    except ValueError:
        return False
    return True


def said_due_ms(ask: Ask, forms: Sequence[str], default_delay_ms: int, now_ms: int, sure_ms: int) -> tuple[int, int]:
    """The due instant, and the instant from which the wait for it counts.

    Raises UnreadableDelay, beginning with the form that could not be read.
    """
    headers = ask.headers
    form = ""
    try:
        for form in forms:
            header = HEADERS.get(form)
            if header is None:
                found = _of_others(form, ask, now_ms, sure_ms)
                if found is not None:
                    return found
            elif header in headers:
                if form in ABSOLUTE:
                    return read_instant_ms(headers[header]), sure_ms
                return _in(read_delay_ms(headers[header]), ask, now_ms, sure_ms)
    except UnreadableDelay as unreadable:
        raise UnreadableDelay(f"{form}: {unreadable}") from unreadable
    return _in(default_delay_ms, ask, now_ms, sure_ms)


def wants_no_delay(ask: Ask, forms: Sequence[str], default_delay_ms: int) -> bool:
    """Whether it asks for none, or for one of less than nothing: that is meant to be at once, and is never late.

    Of a message that can be read.
    """
    for form in forms:
        header = HEADERS.get(form)
        if header is not None and header in ask.headers:
            return form in RELATIVE and read_delay_ms(ask.headers[header]) <= 0
        if header is None and _of_others(form, ask, 0, 0) is not None:
            seconds = None
            if form in (NSERVICEBUS, ROUTING_KEY_BITS):
                in_key = delay_in_key(ask.routing_key)
                seconds = nservicebus.delay_seconds(ask.headers) if form == NSERVICEBUS else in_key
            return seconds is not None and seconds <= 0
    return default_delay_ms <= 0


def _of_others(form: str, ask: Ask, now_ms: int, sure_ms: int) -> tuple[int, int] | None:
    """What other systems' messages say; None where this form is not present."""
    due_ms: int | None = None
    match form:
        case "timestamp":
            due_ms = None if ask.timestamp is None else ask.timestamp * 1000
        case "nservicebus":
            seconds = nservicebus.delay_seconds(ask.headers)
            due_ms = nservicebus.delayed_until_ms(ask.headers)
            if due_ms is None and seconds is not None:
                return _in(seconds * 1000, ask, now_ms, sure_ms)
        case "nservicebus-timeout":
            timeout = nservicebus.timeout(ask.headers)
            due_ms = None if timeout is None else timeout.due_ms
        case "routing-key-bits":
            seconds = delay_in_key(ask.routing_key)
            return None if seconds is None else _in(seconds * 1000, ask, now_ms, sure_ms)
        case "celery-eta":
            due_ms = eta_ms(ask.headers.get(ETA))
        case _:
            due_ms = instant_in_json_ms(ask.body, form.removeprefix(JSON), ask.content_encoding)
    return None if due_ms is None else (due_ms, sure_ms)


def _in(delay_ms: int, ask: Ask, now_ms: int, sure_ms: int) -> tuple[int, int]:
    """For a relative delay: the due instant, and the instant from which the wait for it counts."""
    if delay_ms <= 0:
        # No delay at all means this instant, and not one that the clock may be yet to reach.
        return sure_ms + delay_ms, sure_ms
    stamp = _received_ms(ask)
    return (now_ms + delay_ms, now_ms) if stamp is None else (stamp + delay_ms, sure_ms)


def _received_ms(ask: Ask) -> int | None:
    """The broker's ``timestamp_in_ms`` where present: a relative delay counts from it, so that a wait in the intake
    queue does not add up. Else None: it counts from now.

    A message that was delayed before may still carry the stamp of its first arrival (the broker's interceptor does not
    overwrite by default), and counting from that would be early.
    """
    stamp = ask.headers.get(RECEIVED_AT)
    if stamp is None:
        return None
    if LAST_DUE in ask.headers or not isinstance(stamp, int) or isinstance(stamp, bool | Timestamp) or stamp <= 0:
        return None
    return stamp
