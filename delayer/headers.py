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


def key(name: str, *, keep: bool = False, debounce: timedelta | None = None) -> dict[str, str | int]:
    """Headers of a message that replaces the waiting message of the same key. It needs a store. With ``keep`` the
    waiting message stays, and this one is dropped. With ``debounce`` it replaces, but is due at most this long after
    the first message that waited. Raises ValueError if ``name`` is empty, or longer than 255 bytes of UTF-8; if
    ``debounce`` is negative; and for both modes at once.

    >>> key("order-4711")
    {'x-delay-key': 'order-4711'}
    >>> key("index", debounce=timedelta(minutes=1))
    {'x-delay-key': 'index', 'x-delay-key-mode': 'debounce', 'x-delay-key-ceiling': 60000}
    """
    headers: dict[str, str | int] = {"x-delay-key": _checked(name)}
    if keep and debounce is not None:
        raise ValueError(f"expected keep or debounce, found both: debounce={debounce}")
    if keep:
        return headers | {"x-delay-key-mode": "keep"}
    if debounce is None:
        return headers
    if debounce < timedelta(0):
        raise ValueError(f"expected a ceiling of zero or more, found {debounce}")
    return headers | {"x-delay-key-mode": "debounce", "x-delay-key-ceiling": -(-debounce // _MILLISECOND)}


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
