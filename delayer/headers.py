"""Header tables for publishers of delayed messages, for pika, aio-pika, kombu or any other client.

    >>> from datetime import timedelta
    >>> delay(timedelta(minutes=10)) | key("order-4711")
    {'x-delay': 600000, 'x-delay-key': 'order-4711'}

The module needs only the standard library. Each function returns a new ``dict``; ``|`` joins several of them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_MILLISECOND = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_KEY_BYTES = 255


def delay(wait: timedelta) -> dict[str, int]:
    """Headers of a message due after ``wait``, in whole ms, rounded up. Raises ValueError if ``wait`` is negative.

    >>> delay(timedelta(seconds=1.5))
    {'x-delay': 1500}
    """
    if wait < timedelta(0):
        raise ValueError(f"expected a delay of zero or more, found {wait}")
    return {"x-delay": -(-wait // _MILLISECOND)}


def at(due: datetime) -> dict[str, int]:
    """Headers of a message due at this time, as epoch ms, rounded up. Raises ValueError if ``due`` has no time zone,
    because its instant would then depend on the machine.

    >>> at(datetime(2030, 1, 1, tzinfo=UTC))
    {'x-deliver-at': 1893456000000}
    """
    if due.utcoffset() is None:
        raise ValueError(f"expected a datetime with a time zone, found the naive {due.isoformat()}")
    return {"x-deliver-at": -(-(due - _EPOCH) // _MILLISECOND)}


def key(name: str) -> dict[str, str]:
    """Header of a message that replaces the waiting message of the same key. It needs a store. Raises ValueError if
    ``name`` is empty, or longer than 255 bytes of UTF-8.

    >>> key("order-4711")
    {'x-delay-key': 'order-4711'}
    """
    return {"x-delay-key": _checked(name)}


def cancel(name: str) -> dict[str, str]:
    """Header of a message that cancels the waiting message of this key. It needs a store. Raises ValueError if ``name``
    is empty, or longer than 255 bytes of UTF-8.

    >>> cancel("order-4711")
    {'x-delay-cancel': 'order-4711'}
    """
    return {"x-delay-cancel": _checked(name)}


def _checked(name: str) -> str:
    if not 1 <= (size := len(name.encode())) <= _KEY_BYTES:
        raise ValueError(f"expected a key of 1 to {_KEY_BYTES} bytes, found {size}")
    return name
