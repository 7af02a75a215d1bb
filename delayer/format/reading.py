"""Messages in readable form: properties, typed headers, addresses and times. Not for the hot path."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.properties import NAMES, Properties
from delayer.amqp.values import Timestamp
from delayer.core.filters import Filter
from delayer.core.message import as_text, raw
from delayer.core.readable import instant
from delayer.schedule.schedule import SCHEDULE, is_name

TYPES: Final = {
    "b": "int8", "B": "uint8", "s": "int16", "u": "uint16", "I": "int32", "i": "uint32", "l": "int64", "L": "int64",
    "f": "float", "d": "double", "D": "decimal", "t": "bool", "T": "timestamp", "S": "string", "x": "bytes",
    "A": "array", "F": "table", "V": "void",
}  # fmt: skip
PREVIEW: Final = 400
"""How many bytes of a body are shown by default."""
MOST_HEADERS: Final = 100
MOST_HEADER_BYTES: Final = 8 << 10
"""Of a message in a list. Fifty messages may have three million headers."""


class Header(NamedTuple):
    """One header: its name, the name of its type, and its value for JSON."""

    name: str
    type: str
    value: Any


class DecodedProperties(NamedTuple):
    """Decoded properties. ``broken`` describes the unreadable part, if any; the rest is decoded. ``left_out``: how many
    bytes of headers a list leaves out."""

    properties: dict[str, str | int]
    headers: Sequence[Header]
    broken: str = ""
    left_out: int = 0


def decode_properties(raw: bytes, *, whole: bool) -> DecodedProperties:
    """Decode the properties of a message as far as possible. ``whole``: with all headers, and not as in a list."""
    try:
        found = Properties.parse(raw)
    except MalformedProperties as error:
        return DecodedProperties({}, (), str(error))
    values: dict[str, str | int] = {}
    for name in NAMES:
        if name == "headers" or name not in found.spans:
            continue
        if name in ("delivery_mode", "priority", "timestamp"):
            start, stop = found.spans[name]
            values[name] = int.from_bytes(raw[start:stop], "big")
        else:
            values[name] = as_text(found.short(name) or b"")
    try:
        fields, left_out = (found.headers_items(), 0) if whole else found.first_headers(MOST_HEADERS, MOST_HEADER_BYTES)
        headers = [Header(as_text(one.name), TYPES.get(chr(one.type), "?"), plain(one.value)) for one in fields]
    except MalformedTable as error:
        return DecodedProperties(values, (), str(error))
    return DecodedProperties(values, headers, left_out=left_out)


def value_text(value: Any) -> str:
    """Format a value of :func:`plain` for people: a string verbatim, everything else as JSON.

    >>> value_text("a"), value_text(None), value_text({"b": [True, 1]})
    ('a', 'null', '{"b": [true, 1]}')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> Any:  # noqa: PLR0911 - one return for each type
    """Convert a decoded value to types of JSON."""
    match value:
        case Timestamp():
            return instant(int(value) * 1000)
        case bytes():
            return as_text(value)
        case str():
            return as_text(raw(value))
        case bool() | int() | None:
            return value
        case float():
            return value if value - value == 0 else str(value)  # JSON has neither infinities nor NaN.
        case list():
            return [plain(one) for one in value]
        case dict():
            return {plain(name): plain(one) for name, one in value.items()}
        case _:
            return str(value)


def address(exchange: bytes, routing_key: bytes) -> str:
    """Format a destination: the exchange and the key, or the queue."""
    return f"{as_text(exchange)} / {as_text(routing_key)}" if exchange else f"queue {as_text(routing_key)}"


def route_text(route: bytes, properties: bytes, none: str = "(straight to the queue)") -> str:
    """Format a message's route. Without one, name the schedule that made the message, if any, or return ``none``."""
    name = "" if route else schedule_of(properties)
    return as_text(route) or (f"(schedule {name})" if name else none)


def schedule_of(properties: bytes) -> str:
    """The name of the schedule that made a message; "" if none did, or if the header has no such name."""
    if SCHEDULE not in properties:
        return ""
    with suppress(MalformedProperties, MalformedTable):
        header = Properties.parse(properties).get(SCHEDULE)
        if header is not None and header.type == ord("S") and is_name(name := as_text(header.content)):
            return name
    return ""


def preview(body: bytes, limit: int = PREVIEW) -> str:
    """Show the start of a body as text if it is printable, else in hexadecimal."""
    head = body[:limit]
    try:
        # Not final, because the limit may cut a character of up to four bytes.
        shown = getincrementaldecoder("utf-8")().decode(head, final=len(head) == len(body))
    except UnicodeDecodeError:
        return head.hex(" ")
    return shown if all(one.isprintable() or one in "\t\r\n" for one in shown) else head.hex(" ")


def message_id(raw: bytes) -> bytes | None:
    """The ``message_id`` in a message's properties; None if it is empty or missing, or if they are malformed."""
    try:
        return Properties.parse(raw).short("message_id") or None
    except MalformedProperties:
        return None


def has_properties(raw: bytes, wanted: Filter) -> bool:
    """Whether a message's properties have the message_id and headers of ``wanted``: the first of each name, as text. An
    array or a table is never equal to a text, and takes long to decode."""
    if wanted.message_id is None and not wanted.headers:
        return True
    if not all(name in raw for name, _ in wanted.headers) or (wanted.message_id or b"") not in raw:
        return False
    try:
        found = Properties.parse(raw)
        return wanted.message_id in (None, found.short("message_id")) and all(
            (field := found.get(name)) is not None and field.type not in b"AF" and _as_text(field.value) == value
            for name, value in wanted.headers
        )
    except (MalformedProperties, MalformedTable):
        return False


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(plain(value))
