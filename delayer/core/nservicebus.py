"""What NServiceBus messages say about time, in their headers. Pure. Tests: tests/unit/core/test_nservicebus.py.

Two ways. Since 2017 (native delays) a message says ``DelayInSeconds``, counted from when it was sent, or, for a delayed
retry, from when it failed. Before that (the timeout manager) it says ``Timeout.Expire``, the due instant, and
``Timeout.RouteExpiredTimeoutTo``, the queue to go to then. Header values are as :mod:`delayer.amqp.properties` decodes
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from delayer.core.delay_headers import UnreadableDelay, read_delay_ms, read_instant_ms, shown

DELAY_IN_SECONDS: Final = b"NServiceBus.Transport.RabbitMQ.DelayInSeconds"
TIME_SENT: Final = b"NServiceBus.TimeSent"
DELIVER_AT: Final = b"NServiceBus.DeliverAt"
RETRIES_TIMESTAMP: Final = b"NServiceBus.Retries.Timestamp"
EXPIRE: Final = b"NServiceBus.Timeout.Expire"
ROUTE_EXPIRED_TO: Final = b"NServiceBus.Timeout.RouteExpiredTimeoutTo"
REPLY_TO: Final = b"NServiceBus.ReplyToAddress"
CLEAR_TIMEOUTS: Final = b"NServiceBus.ClearTimeouts"
SAGA_ID: Final = b"NServiceBus.SagaId"
MESSAGE_ID: Final = b"NServiceBus.MessageId"

CONSULTED: Final = frozenset(
    {
        DELAY_IN_SECONDS, TIME_SENT, DELIVER_AT, RETRIES_TIMESTAMP,
        EXPIRE, ROUTE_EXPIRED_TO, REPLY_TO, CLEAR_TIMEOUTS, SAGA_ID, MESSAGE_ID,
    }
)  # fmt: skip
"""The headers that these functions look at."""

Headers = Mapping[bytes, object]

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - as the texts are that are compared with it
# yyyy-MM-dd HH:mm:ss:ffffff Z: a colon before the microseconds, and always UTC.
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d):(\d{6}) Z", re.ASCII)


class Timeout(NamedTuple):
    """What a message to a timeout manager asks for: ``address`` is a queue."""

    due_ms: int
    address: bytes


def read_wire_instant_ms(value: object) -> int:
    """An instant as NServiceBus writes it, in epoch ms, rounded up. Raises UnreadableDelay.

    >>> read_wire_instant_ms("2026-04-29 22:11:26:330982 Z") % 100_000
    86331
    """
    found = _INSTANT.fullmatch(value) if isinstance(value, str) else None
    try:
        if found is not None:
            return _epoch_ms(f"{found[1]}.{found[2]}")
    except UnreadableDelay:
        pass  # the 31st of February: said below, in the words of this format
    raise UnreadableDelay(f"expected an instant like 2026-04-29 22:11:26:330982 Z, found {shown(value)}")


def _epoch_ms(text: str) -> int:
    """Of an instant in UTC without its zone. Raises UnreadableDelay."""
    try:
        since = datetime.fromisoformat(text) - _EPOCH  # in a tenth of the time: an import reads one in every row
    except ValueError:
        return read_instant_ms(f"{text}Z")  # a leap second is an instant, too
    return (since.days * 86_400 + since.seconds) * 1000 - (-since.microseconds // 1000)


def wire_instant(epoch_ms: int) -> str:
    """The other way round, for messages that we make. The year must have four digits."""
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=epoch_ms)
    return f"{moment:%Y-%m-%d %H:%M:%S}:{moment.microsecond:06d} Z"


def delay_seconds(headers: Headers) -> int | None:
    """How long the message is delayed; None where it does not say that it is. Raises UnreadableDelay."""
    if DELAY_IN_SECONDS not in headers:
        return None
    try:
        return read_delay_ms(headers[DELAY_IN_SECONDS])  # the same numbers, of another unit
    except UnreadableDelay as unreadable:
        raise UnreadableDelay(str(unreadable).replace("milliseconds", "seconds", 1)) from unreadable


def delayed_until_ms(headers: Headers) -> int | None:
    """The due instant of a delayed message, in epoch ms; None where it is not delayed, or does not say since when.

    The latest of what the headers allow. A delayed retry is a copy of the message that failed: its TimeSent and
    DeliverAt are of the first sending, and only Retries.Timestamp is new. A message that an outbox kept back is sent
    with a shorter delay than its TimeSent goes with, and DeliverAt is right. Raises UnreadableDelay.
    """
    seconds = delay_seconds(headers)
    since = [_instant(headers, name) for name in (TIME_SENT, RETRIES_TIMESTAMP) if name in headers]
    if seconds is None or not since:
        return None
    due_ms = max(since) + seconds * 1000
    return max(due_ms, _instant(headers, DELIVER_AT)) if DELIVER_AT in headers else due_ms


def expires_ms(headers: Headers) -> int | None:
    """When a timeout is due; None for a message that is none. Raises UnreadableDelay."""
    return _instant(headers, EXPIRE) if EXPIRE in headers else None


def timeout(headers: Headers) -> Timeout | None:
    """What the message asks of a timeout manager; None where it asks for no timeout. Raises UnreadableDelay."""
    due_ms = expires_ms(headers)
    if due_ms is None:
        return None
    for name in (ROUTE_EXPIRED_TO, REPLY_TO):
        address = _bytes(headers.get(name))
        if address:
            return Timeout(due_ms, address)
    raise UnreadableDelay(
        f"expected the address of a queue in {ROUTE_EXPIRED_TO.decode()} or {REPLY_TO.decode()}, found neither"
    )


def cleared_saga(headers: Headers) -> bytes | None:
    """The saga whose timeouts are all to go; None where the message asks for something else.

    Raises UnreadableDelay where it names none.
    """
    said = headers.get(CLEAR_TIMEOUTS)
    if not (said is True or (isinstance(said, str) and said.lower() == "true")):
        return None
    saga = saga_of(headers)
    if saga is None:
        raise UnreadableDelay(
            f"{CLEAR_TIMEOUTS.decode()}: expected a saga in {SAGA_ID.decode()}, found {shown(headers.get(SAGA_ID))}"
        )
    return saga


def saga_of(headers: Headers) -> bytes | None:
    """The id of the saga that a message belongs to; None where it belongs to none, which may be said by zeros."""
    saga = (_bytes(headers.get(SAGA_ID)) or b"").lower()
    return saga if saga.strip(b"0-{}") else None


def _instant(headers: Headers, name: bytes) -> int:
    try:
        return read_wire_instant_ms(headers[name])
    except UnreadableDelay as unreadable:
        raise UnreadableDelay(f"{name.decode()}: {unreadable}") from unreadable


def _bytes(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return value if isinstance(value, bytes) else None
