"""The properties of a message that somebody wrote as JSON or TOML: by HTTP, SQL, ``delayer send``, a schedule or a
retry. One encoder, so that the same value has the same bytes by every way in. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from delayer.amqp.properties import MAX_DEPTH, Properties, changed, encode_headers, entry, int64, long_string, sized
from delayer.amqp.values import SHORT_STRING

_INT64: Final = 1 << 63


def encode_properties(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> bytes:
    """Encode the properties of a persistent message. Raises ValueError, OverflowError, RecursionError for values that
    AMQP cannot express; AttributeError, TypeError and LookupError for those of a wrong kind.

    >>> encode_properties({"x-delay-key": "k"}, {"message_id": "m", "priority": 3}).hex(" ", 4)
    '38800000 00120b78 2d64656c 61792d6b 65795300 0000016b 0203016d'
    """
    base = Properties.parse(encode_headers(encode_entries(headers)))
    return changed(base, {name: encode_property(name, value) for name, value in properties.items()})


def encode_property(name: str, value: Any) -> bytes:
    """Encode ``priority``, or a property that is a short string."""
    return bytes((value,)) if name == "priority" else _short(value)


def _short(value: str) -> bytes:
    raw = value.encode()
    if len(raw) > SHORT_STRING:
        raise ValueError(f"expected at most {SHORT_STRING} bytes, found {len(raw)}")
    return bytes((len(raw),)) + raw


def encode_table(headers: Mapping[str, Any]) -> bytes:
    """Encode the property ``headers``."""
    return sized(b"", encode_entries(headers))


def encode_entries(headers: Mapping[str, Any]) -> bytes:
    return b"".join(entry(name.encode(), encode_value(value)) for name, value in headers.items())


def encode_value(value: object, depth: int = MAX_DEPTH) -> bytes:  # noqa: PLR0911 - one for each type
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
            return sized(b"A", b"".join(encode_value(one, depth - 1) for one in value))
        case dict() if depth:
            return sized(
                b"F", b"".join(entry(name.encode(), encode_value(one, depth - 1)) for name, one in value.items())
            )
    raise ValueError("nested too deeply")
