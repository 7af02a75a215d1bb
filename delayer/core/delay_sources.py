"""The forms in which a message may state its delay (``delay_from``), as a table of readers. Pure."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from delayer.core import nservicebus
from delayer.core.cascade import delay_in_key
from delayer.core.delay_headers import (
    DELAY,
    ETA,
    OWN_SOURCES,
    REQUEST_HEADERS,
    UNITS,
    Asked,
    DelayRequest,
    Source,
    UnreadableDelay,
    quote_value,
    read_due_ms,
    read_eta_ms,
    read_utc_ms,
)
from delayer.core.marks import MARKS, OWN_PREFIX
from delayer.core.message import COPY_HEADERS, as_bytes

CONSULTED: Final = REQUEST_HEADERS | MARKS | {DELAY, ETA} | nservicebus.HEADERS | COPY_HEADERS
"""The headers that every plan reads, in addition to those that its route's settings name. Routes with ``retry`` read
retry_policy.RETRY_HEADERS instead."""

_INDEX: Final = re.compile("[0-9]{1,9}")


def routing_keys_of(value: object) -> frozenset[bytes]:
    """The routing keys in a CC header: its strings. Values of other types are skipped, as by the broker."""
    if not isinstance(value, list):
        return frozenset()
    return frozenset(one for one in map(as_bytes, value) if one is not None)


def _due(read: Callable[[DelayRequest], int | None]) -> Source:
    """Turn a reader of epoch milliseconds into the source of a due time."""

    def source(request: DelayRequest) -> Asked | None:
        due_ms = read(request)
        return None if due_ms is None else (None, due_ms)

    return source


def _nservicebus(request: DelayRequest) -> Asked | None:
    seconds = nservicebus.delay_seconds(request.headers)
    return None if seconds is None else (seconds * 1000, nservicebus.delayed_until_ms(request.headers))


def _timestamp_ms(request: DelayRequest) -> int | None:
    seconds = request.properties.timestamp
    return None if seconds is None else seconds * 1000


def _routing_key_bits(request: DelayRequest) -> Asked | None:
    seconds = delay_in_key(request.routing_key)
    return None if seconds is None else (seconds * 1000, None)


SOURCES: Final[Mapping[str, Source]] = {
    **OWN_SOURCES,
    "timestamp": _due(_timestamp_ms),
    "nservicebus": _nservicebus,
    nservicebus.TIMEOUT_FORM: _due(lambda request: nservicebus.expires_ms(request.headers)),
    "routing-key-bits": _routing_key_bits,
    "celery-eta": _due(lambda request: read_eta_ms(request.headers.get(ETA))),
}
"""The readers of all forms with a fixed name."""
DEFAULT_FORMS: Final = tuple(OWN_SOURCES)
"""The default of ``delay_from``, in this order."""
JSON: Final = "json:"
"""Prefix of a form that continues with a JSON pointer into the body."""
HEADER: Final = "header:"
"""Prefix of a form that continues with a header's name and unit: ``header:NAME[:ms|s|rfc3339]``."""
_LASTING: Final = frozenset({"timestamp", "nservicebus", nservicebus.TIMEOUT_FORM, "celery-eta"})
FORMS: Final = f"{', '.join(SOURCES)}, header:NAME[:{'|'.join(UNITS)}] and json:/pointer"


def header_of(form: str) -> bytes:
    """The name in ``header:NAME[:UNIT]``; empty for other forms, an unknown unit, and a unit alone."""
    name, colon, last = form.removeprefix(HEADER).rpartition(":")
    if not form.startswith(HEADER) or (last in UNITS) != bool(colon):
        return b""
    return (name if colon else last).encode()


def is_lasting(form: str) -> bool:
    """Whether a release leaves this form in the message, so that the form is still there if the message comes back.

    >>> [is_lasting(form) for form in ("timestamp", "json:/eta", "x-deliver-at", "header:wait:s")]
    [True, True, False, False]
    """
    return form in _LASTING or form.startswith(JSON)


def source_of(form: str) -> Source:
    """Return the reader for this value of ``delay_from``. Raises ValueError for an unknown value."""
    if form in SOURCES:
        return SOURCES[form]
    if header := header_of(form):
        if header.startswith(OWN_PREFIX):
            raise ValueError(
                f"expected a header that publishers set, found {quote_value(form)}: it is delayer's own note"
            )
        unit = form.rpartition(":")[2]
        return UNITS[unit if unit in UNITS else "ms"](header)
    if not form.startswith(JSON):
        raise ValueError(f"expected one of {FORMS}, found {quote_value(form)}")
    pointer = form.removeprefix(JSON)
    steps(pointer)  # Report a wrong pointer here, not with each message.
    return _due(lambda request: instant_in_json_ms(request.body, pointer, request.properties.short("content_encoding")))


LONGEST_BODY: Final = 8 << 20
"""Limit of a JSON body, unpacked, in bytes. It may contain a whole mail. Python reads some 7 MB of hostile JSON in a
second, in 25 times the memory."""
PACKED: Final = 16
"""Limit of unpacked bytes per packed byte, in addition to SHORT_BODY. Gzip packs up to a thousandfold, and a batch of
such bodies would keep the daemon from everything else until the watchdog kills it."""
SHORT_BODY: Final = 2 << 10
_GZIP_ONLY: Final = 16 + zlib.MAX_WBITS


def steps(pointer: str) -> tuple[str, ...]:
    """Split a JSON pointer into its parts. Raises ValueError for anything else.

    >>> steps("/nextattempt/time"), steps("/a~1b/~0"), steps("")
    (('nextattempt', 'time'), ('a/b', '~'), ())
    """
    if pointer and not pointer.startswith("/"):
        raise ValueError(f'expected a JSON pointer such as "/nextattempt/time", found {quote_value(pointer)}')
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


def instant_in_json_ms(body: bytes, pointer: str, encoding: bytes | None = None) -> int | None:
    """Read the time at the pointer in epoch ms, rounded up; None for null or no value. Raises UnreadableDelay. It may
    be RFC 3339, with or without a zone (then UTC), or integer epoch milliseconds. A body that is not JSON is an error,
    because the publisher may have meant a due time."""
    value = _at(_parsed(body, encoding), steps(pointer))
    if value is None:
        return None
    if (due_ms := read_due_ms(value) if type(value) is int else read_utc_ms(value)) is None:
        raise UnreadableDelay(
            f"expected an instant in RFC 3339, the same without a zone in UTC, or integer epoch milliseconds, "
            f"found {quote_value(value)}"
        )
    return due_ms


def _parsed(body: bytes, encoding: bytes | None) -> Any:
    plain = _unpacked(body) if encoding is not None and encoding.lower() in (b"gzip", b"x-gzip") else body
    if len(plain) > LONGEST_BODY:
        raise UnreadableDelay(f"expected a JSON body of at most {LONGEST_BODY} bytes, found {len(plain)}")
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):  # ValueError includes UnicodeDecodeError and integers of 5,000 digits.
        raise UnreadableDelay(f"expected a JSON body, found {quote_value(plain[:40])}") from None


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP_ONLY)
    longest = min(LONGEST_BODY, SHORT_BODY + PACKED * len(body))
    try:
        plain = unpacking.decompress(body, longest)
    except zlib.error as error:
        raise UnreadableDelay(f"expected a body in gzip, found other bytes: {error}") from error
    if not unpacking.eof:
        raise UnreadableDelay(
            f"expected a whole body in gzip of at most {longest} bytes unpacked, found a longer or truncated body"
        )
    return plain


def _at(value: Any, path: tuple[str, ...]) -> Any:
    """The value at the path; None if it does not exist."""
    for step in path:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and _INDEX.fullmatch(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
