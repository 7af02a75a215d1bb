"""Content-header properties: found by their spans, spliced in place, never decoded and encoded again.

*Properties* are the bytes after class, weight and body size: the flags, then one value for each flag, in this order:

    15 content_type    14 content_encoding  13 headers (table)  12 delivery_mode (octet)  11 priority (octet)
    10 correlation_id   9 reply_to           8 expiration        7 message_id              6 timestamp (uint64)
     5 type             4 user_id            3 app_id            2 cluster_id; the rest are short strings

Bit 0 would say that more flags follow; AMQP 0-9-1 defines none, so such a header is malformed, and so is bit 1.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, Self

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.fields import (
    SIZED,
    Value,
    byte_array,
    entries,
    entry,
    int64,
    long_string,
    negated,
    negated_if_positive,
    value_at,
)

__all__ = [
    "Field",
    "MalformedProperties",
    "MalformedTable",
    "Properties",
    "byte_array",
    "encode_headers",
    "entry",
    "int64",
    "long_string",
    "negated",
    "negated_if_positive",
    "splice",
    "value_at",
]

_SHORT, _TABLE = 0, -1  # with their own length; the others have this many bytes:
_OCTET, _LONGLONG = 1, 8
_LAYOUT = (
    ("content_type", _SHORT),
    ("content_encoding", _SHORT),
    ("headers", _TABLE),
    ("delivery_mode", _OCTET),
    ("priority", _OCTET),
    ("correlation_id", _SHORT),
    ("reply_to", _SHORT),
    ("expiration", _SHORT),
    ("message_id", _SHORT),
    ("timestamp", _LONGLONG),
    ("type", _SHORT),
    ("user_id", _SHORT),
    ("app_id", _SHORT),
    ("cluster_id", _SHORT),
)
FLAGS = {name: 1 << (15 - position) for position, (name, _) in enumerate(_LAYOUT)}
NAMES = tuple(FLAGS)
_HEADERS = FLAGS["headers"]
_DELIVERY_MODE = FLAGS["delivery_mode"]
_U32 = struct.Struct(">I")
_FLAGS_AND_LENGTH = struct.Struct(">HI")


@lru_cache(maxsize=1 << 14)
def _present(flags: int) -> tuple[tuple[str, int], ...]:
    """Name and kind of what ``flags`` announce. A fleet uses a handful of the 16,384 combinations."""
    if flags & 0b11:
        raise MalformedProperties(f"undefined property flags in {flags:#06x}")
    return tuple((name, kind) for name, kind in _LAYOUT if flags & FLAGS[name])


class Field(NamedTuple):
    """One entry of a header table: ``name``, ``type`` (its byte), and where the value after it lies in ``buffer``."""

    name: bytes
    type: int
    start: int
    end: int
    buffer: bytes

    @property
    def raw(self) -> bytes:
        """The value's bytes after the type byte, with the length of those that have one."""
        return self.buffer[self.start : self.end]

    @property
    def type_and_value(self) -> bytes:
        """The bytes that :func:`entry` takes."""
        return self.buffer[self.start - 1 : self.end]

    @property
    def content(self) -> bytes:
        """The value's bytes without type and length: of a string, the string."""
        return self.buffer[self.start + 4 if self.type in SIZED else self.start : self.end]

    @property
    def value(self) -> Value:
        """The decoded value. Raises MalformedTable for a broken or absurdly nested table inside."""
        return value_at(self.buffer, self.start - 1, self.end)


class Properties:
    """Where everything lies in ``raw``. Header entries are looked at when first asked for.

    ``spans`` maps the name of each property present to (start, end) of its encoded value, length included.
    """

    __slots__ = ("_entries", "flags", "raw", "spans")

    def __init__(self, raw: bytes, flags: int, spans: dict[str, tuple[int, int]]) -> None:
        self.raw = raw
        self.flags = flags
        self.spans = spans
        self._entries: list[tuple[bytes, int, int]] | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Find the spans. Raises MalformedProperties unless the flags and the values' lengths fill ``raw`` exactly.

        A table of the right length whose inside is broken passes here, and raises MalformedTable when it is read.
        """
        length = len(raw)
        if length < 2:
            raise MalformedProperties(f"properties have 2 bytes of flags at least, found {length}")
        flags = raw[0] << 8 | raw[1]
        spans = {}
        at = 2
        try:
            for name, kind in _present(flags):
                if kind == _SHORT:
                    stop = at + 1 + raw[at]
                elif kind == _TABLE:
                    stop = at + 4 + _U32.unpack_from(raw, at)[0]
                else:
                    stop = at + kind
                spans[name] = (at, stop)
                at = stop
        except (IndexError, struct.error) as cut:
            raise MalformedProperties(f"the property list is cut short at offset {at} of {length}") from cut
        if at != length:
            raise MalformedProperties(f"the properties announced take {at} bytes, found {length}")
        return cls(raw, flags, spans)

    @property
    def headers_span(self) -> tuple[int, int] | None:
        """Where the table's entries lie (after its length), or None where there is no table."""
        span = self.spans.get("headers")
        return None if span is None else (span[0] + 4, span[1])

    def entries(self) -> list[tuple[bytes, int, int]]:
        """The table's own entries as (name, offset of the type byte, end); see :meth:`headers_items`."""
        if self._entries is None:
            span = self.spans.get("headers")
            self._entries = [] if span is None else entries(self.raw, span[0] + 4, span[1])
        return self._entries

    def headers_items(self) -> list[Field]:
        """The table's own entries in order, duplicates included. Raises MalformedTable if its bytes do not add up."""
        raw = self.raw
        return [Field(name, raw[type_at], type_at + 1, stop, raw) for name, type_at, stop in self.entries()]

    def get(self, name: bytes) -> Field | None:
        """The first header of that name. Raises MalformedTable if the table is broken anywhere."""
        for found, type_at, stop in self.entries():
            if found == name:
                return Field(name, self.raw[type_at], type_at + 1, stop, self.raw)
        return None

    def short(self, name: str) -> bytes | None:
        """The content of a short-string property, such as ``message_id``; None where it is absent."""
        span = self.spans.get(name)
        return None if span is None else self.raw[span[0] + 1 : span[1]]

    @property
    def message_id(self) -> bytes | None:
        return self.short("message_id")

    @property
    def expiration(self) -> bytes | None:
        return self.short("expiration")

    @property
    def user_id(self) -> bytes | None:
        return self.short("user_id")

    @property
    def timestamp(self) -> int | None:
        """Seconds since the epoch, 0 to 2**64 - 1."""
        span = self.spans.get("timestamp")
        return None if span is None else int.from_bytes(self.raw[span[0] : span[1]], "big")

    @property
    def delivery_mode(self) -> int | None:
        span = self.spans.get("delivery_mode")
        return None if span is None else self.raw[span[0]]


def splice(
    properties: bytes | Properties,
    *,
    remove: Collection[bytes] = (),
    remove_prefixes: tuple[bytes, ...] = (),
    replace: Mapping[bytes, bytes] | None = None,
    append: bytes = b"",
    drop: Collection[str] = (),
    delivery_mode: int | None = None,
) -> bytes:
    """The properties with these edits, every other byte as it was.

    ``remove`` and ``remove_prefixes`` take every header of such a name out; ``replace`` gives every header of a name
    another type and value (it adds none); ``append`` is encoded entries for the table's end, which makes a table
    where there was none. ``drop`` names properties to take out (unknown names raise ValueError), ``delivery_mode`` is
    set or replaced. A table stays, empty, when its last entry goes.
    Raises MalformedProperties, and MalformedTable where entries must be looked at and cannot be.
    """
    found = properties if isinstance(properties, Properties) else Properties.parse(properties)
    raw, spans, flags = found.raw, found.spans, found.flags
    edits: list[tuple[tuple[int, int], bytes]] = []  # spans of ``raw``, and what stands there instead
    for name in drop:
        bit = FLAGS[name] if name in FLAGS else _unknown(name)
        if flags & bit:
            flags ^= bit
            if bit != _HEADERS or not append:
                edits.append((spans[name], b""))
    if append or (flags & _HEADERS and (remove or remove_prefixes or replace)):
        table = _edited(found, remove, remove_prefixes, replace or {}) if flags & _HEADERS else b""
        span = spans.get("headers") or _gap(found, "headers")
        edits.append((span, _U32.pack(len(table) + len(append)) + table + append))
        flags |= _HEADERS
    if delivery_mode is not None:
        edits.append((spans.get("delivery_mode") or _gap(found, "delivery_mode"), bytes((delivery_mode,))))
        flags |= _DELIVERY_MODE
    if len(edits) > 1:
        edits.sort(key=_span)  # stable: of two that fill the same gap the table comes first, as it did above
    parts = [flags.to_bytes(2, "big")]
    copied = 2
    # What no edit touches is copied in one slice.
    for (start, stop), instead in edits:
        parts += (raw[copied:start], instead)
        copied = stop
    parts.append(raw[copied:])
    return b"".join(parts)


_span = itemgetter(0)


def _unknown(name: str) -> int:
    raise ValueError(f"expected a property of {', '.join(NAMES)}, found {name!r}")


def _gap(properties: Properties, name: str) -> tuple[int, int]:
    """The empty span where a property belongs that is absent: before the next one present."""
    for later in NAMES[NAMES.index(name) + 1 :]:
        span = properties.spans.get(later)
        if span is not None:
            return span[0], span[0]
    return len(properties.raw), len(properties.raw)


def _edited(
    properties: Properties, remove: Collection[bytes], prefixes: tuple[bytes, ...], replace: Mapping[bytes, bytes]
) -> bytes:
    """The table's entries after removal and replacement."""
    span = properties.headers_span
    if span is None:
        return b""
    raw = properties.raw
    copied, end = span
    if not (remove or prefixes or replace):
        return raw[copied:end]
    parts: list[bytes] = []
    for name, type_at, stop in properties.entries():
        if name in remove or name.startswith(prefixes):
            parts.append(raw[copied : type_at - 1 - len(name)])
            copied = stop
        elif name in replace:
            parts += (raw[copied:type_at], replace[name])
            copied = stop
    parts.append(raw[copied:end])
    return b"".join(parts)


def encode_headers(headers: bytes = b"", delivery_mode: int = 2) -> bytes:
    """Properties of a message of our own: a table of the encoded entries, and the delivery mode."""
    return _FLAGS_AND_LENGTH.pack(_HEADERS | _DELIVERY_MODE, len(headers)) + headers + bytes((delivery_mode,))
