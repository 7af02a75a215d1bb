"""Delays and due times in the headers of NServiceBus messages. Pure. Tests: tests/unit/core/test_nservicebus.py.

Native delays (since 2017) have ``DelayInSeconds``, measured from the sending, or for a delayed retry from the failure.
Messages for the older timeout manager have ``Timeout.Expire``, the due time, and ``Timeout.RouteExpiredTimeoutTo``, the
destination queue. Header values are decoded as by :mod:`delayer.amqp.properties`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from delayer.amqp.values import SHORT_STRING
from delayer.core.delay_headers import UnreadableDelay, quote_value, read_delay_ms, read_instant_ms
from delayer.core.message import KeyGroup, as_bytes

DELAY_IN_SECONDS: Final = b"NServiceBus.Transport.RabbitMQ.DelayInSeconds"
TIME_SENT: Final = b"NServiceBus.TimeSent"
DELAYED_UNTIL: Final = b"NServiceBus.DeliverAt"
RETRIES_TIMESTAMP: Final = b"NServiceBus.Retries.Timestamp"
EXPIRE: Final = b"NServiceBus.Timeout.Expire"
ROUTE_EXPIRED_TO: Final = b"NServiceBus.Timeout.RouteExpiredTimeoutTo"
REPLY_TO: Final = b"NServiceBus.ReplyToAddress"
CLEAR_TIMEOUTS: Final = b"NServiceBus.ClearTimeouts"
SAGA_ID: Final = b"NServiceBus.SagaId"
MESSAGE_ID: Final = b"NServiceBus.MessageId"

HEADERS: Final = frozenset(
    {
        DELAY_IN_SECONDS, TIME_SENT, DELAYED_UNTIL, RETRIES_TIMESTAMP,
        EXPIRE, ROUTE_EXPIRED_TO, REPLY_TO, CLEAR_TIMEOUTS, SAGA_ID, MESSAGE_ID,
    }
)  # fmt: skip
"""The headers that these functions read."""

Headers = Mapping[bytes, object]

# The format is yyyy-MM-dd HH:mm:ss:ffffff Z: a colon precedes the microseconds, and the zone is always UTC.
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d):(\d{6}) Z", re.ASCII)


TIMEOUT_FORM: Final = "nservicebus-timeout"
"""The ``delay_from`` of a route that reads messages for a timeout manager."""
_SAGA: Final = b"nservicebus-saga:%b:"


def read_wire_instant_ms(value: object) -> int:
    """Read a time in NServiceBus's format as epoch ms, rounded up. Raises UnreadableDelay.

    >>> read_wire_instant_ms("2026-04-29 22:11:26:330982 Z") % 100_000
    86331
    """
    found = _INSTANT.fullmatch(value) if isinstance(value, str) else None
    try:
        return read_instant_ms(f"{found[1]}.{found[2]}Z" if found else None)
    except UnreadableDelay:
        raise UnreadableDelay(
            f"expected an instant like 2026-04-29 22:11:26:330982 Z, found {quote_value(value)}"
        ) from None


def delay_seconds(headers: Headers) -> int | None:
    """Read the delay of a message in seconds; None if the message is not delayed. Raises UnreadableDelay."""
    return read_delay_ms(headers[DELAY_IN_SECONDS], "seconds") if DELAY_IN_SECONDS in headers else None


def delayed_until_ms(headers: Headers) -> int | None:
    """Read the due time of a delayed message in epoch ms; None without a delay or a time of sending.

    The latest time in the headers wins. A delayed retry is a copy of the failed message: TimeSent and DeliverAt are
    from the first sending, and only Retries.Timestamp is new. An outbox sends a message late, with a shorter delay, so
    only DeliverAt is right. Raises UnreadableDelay."""
    seconds = delay_seconds(headers)
    since = [_instant(headers, name) for name in (TIME_SENT, RETRIES_TIMESTAMP) if name in headers]
    if seconds is None or not since:
        return None
    due_ms = max(since) + seconds * 1000
    return max(due_ms, _instant(headers, DELAYED_UNTIL)) if DELAYED_UNTIL in headers else due_ms


def expires_ms(headers: Headers) -> int | None:
    """Read the due time of a timeout in epoch ms; None for any other message. Raises UnreadableDelay."""
    return _instant(headers, EXPIRE) if EXPIRE in headers else None


def timeout_address(headers: Headers) -> bytes | None:
    """Read the queue that a timeout names; None for any other message. Raises UnreadableDelay."""
    if expires_ms(headers) is None:
        return None
    address = as_bytes(headers.get(ROUTE_EXPIRED_TO)) or as_bytes(headers.get(REPLY_TO))
    if not address:
        names = f"{ROUTE_EXPIRED_TO.decode()} or {REPLY_TO.decode()}"
        raise UnreadableDelay(f"expected the address of a queue in {names}, found neither")
    if len(address) > SHORT_STRING:
        raise UnreadableDelay(f"expected an address of at most {SHORT_STRING} bytes, found {len(address)}")
    return address


def cleared_timeouts(headers: Headers) -> KeyGroup | None:
    """The keys of the timeouts that a message clears, or None. Raises UnreadableDelay if it clears some but names no
    saga."""
    value = headers.get(CLEAR_TIMEOUTS)
    if not (value is True or (isinstance(value, str) and value.lower() == "true")):
        return None
    saga = saga_of(headers)
    if saga is None:
        raise UnreadableDelay(
            f"{CLEAR_TIMEOUTS.decode()}: expected a saga in {SAGA_ID.decode()}, "
            f"found {quote_value(headers.get(SAGA_ID))}"
        )
    return KeyGroup(_SAGA % saga)


def timeout_key(headers: Headers, message_id: bytes | None, due_ms: int) -> bytes | None:
    """The key of a saga's timeout, by which a saga can clear it; None without a saga. Also None without a message id,
    because two timeouts would share the key, and one of them would be lost."""
    saga = saga_of(headers)
    if EXPIRE not in headers or not message_id or saga is None:
        return None
    key = (_SAGA % saga) + b"%b:%d" % (message_id, due_ms)
    return key if len(key) <= SHORT_STRING else None


def saga_of(headers: Headers) -> bytes | None:
    """The id of a message's saga; None if it is missing or all zeros."""
    saga = (as_bytes(headers.get(SAGA_ID)) or b"").lower()
    return saga if saga.strip(b"0-{}") else None


def _instant(headers: Headers, name: bytes) -> int:
    try:
        return read_wire_instant_ms(headers[name])
    except UnreadableDelay as unreadable:
        raise UnreadableDelay(f"{name.decode()}: {unreadable}") from unreadable
