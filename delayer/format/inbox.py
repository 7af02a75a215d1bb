"""Rows of the SQL inbox as deliveries: the properties that a publisher of the same message would have encoded. Pure.

A row has its headers and its other properties as JSON. ``delayer_send`` has checked them (migrations/versions/0002). A
row that cannot be encoded, such as one written by hand, becomes a delivery with malformed properties, which the intake
refuses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

from delayer.amqp.properties import MAX_DEPTH, Properties, changed, encode_headers, entry, int64, long_string, sized
from delayer.amqp.values import SHORT_STRING, Delivery
from delayer.core.delay_headers import BY_SQL, DELIVER_AT

UNENCODABLE: Final = b""
"""Properties that no delivery can have."""
_INT64: Final = 1 << 63
_NO_HEADERS: Final = encode_headers()


def delivery_of_row(tag: int, row: Mapping[str, Any]) -> Delivery:
    """Build the delivery of a row: ``exchange``, ``routing_key``, ``headers``, ``properties`` and ``body``."""
    try:
        properties = _encode(json.loads(row["headers"]), json.loads(row["properties"]))
    except (ValueError, LookupError, OverflowError, RecursionError, AttributeError, TypeError):
        properties = UNENCODABLE
    return Delivery(tag, False, row["exchange"].encode(), row["routing_key"].encode(), properties, row["body"])


def _encode(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> bytes:
    """Encode the properties of a persistent message. Raises ValueError, OverflowError, RecursionError for values that
    AMQP cannot express; AttributeError, TypeError and LookupError for those of a wrong kind.

    >>> _encode({"x-delay-key": "k"}, {"message_id": "m", "priority": 3}).hex(" ", 4)
    '38800000 00120b78 2d64656c 61792d6b 65795300 0000016b 0203016d'
    """
    if "x-death" in headers:
        raise ValueError("no broker has dead-lettered a row: a retry would believe the queue that this names")
    if DELIVER_AT.decode() in headers:
        headers = {**headers, BY_SQL.decode(): True}
    table = b"".join(entry(name.encode(), _encode_value(value)) for name, value in headers.items())
    base = encode_headers(table) if table else _NO_HEADERS
    values = {name: bytes((value,)) if name == "priority" else _short(value) for name, value in properties.items()}
    return changed(Properties.parse(base), values)


def _short(value: str) -> bytes:
    raw = value.encode()
    if len(raw) > SHORT_STRING:
        raise ValueError(f"expected at most {SHORT_STRING} bytes, found {len(raw)}")
    return bytes((len(raw),)) + raw


def _encode_value(value: object, depth: int = MAX_DEPTH) -> bytes:  # noqa: PLR0911 - one for each type
    """Encode type and value of a header. Integers have 64 bits, as far as they fit; other numbers are doubles."""
    match value:
        case None:
            return b"V"
        case bool():
            return b"t" + bytes((value,))
        case int() if -_INT64 <= value < _INT64:
            return int64(value)
        case int() | float():
            return b"d" + struct.pack(">d", float(value))
        case str():
            return long_string(value.encode())
        case list() if depth:
            return sized(b"A", b"".join(_encode_value(one, depth - 1) for one in value))
        case dict() if depth:
            return sized(
                b"F", b"".join(entry(name.encode(), _encode_value(one, depth - 1)) for name, one in value.items())
            )
    raise ValueError("nested too deeply")
