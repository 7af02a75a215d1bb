"""Content-header properties: located by their spans and edited in place, never decoded and re-encoded.

*Properties* are the bytes after class, weight and body size: the flags, then one value for each flag, in this order:

    15 content_type    14 content_encoding  13 headers (table)  12 delivery_mode (octet)  11 priority (octet)
    10 correlation_id   9 reply_to           8 expiration        7 message_id              6 timestamp (uint64)
     5 type             4 user_id            3 app_id            2 cluster_id; the rest are short strings

Bit 0 would announce more flags, but AMQP 0-9-1 defines none, so properties with bit 0 or bit 1 are malformed.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Self

from delayer.amqp.errors import MalformedProperties, MalformedTable
from delayer.amqp.values import Timestamp

SIZES: dict[int, int] = {
    ord(kind): size
    for size, kinds in {0: "V", 1: "tbB", 2: "su", 4: "Iif", 5: "D", 8: "lLdT"}.items()
    for kind in kinds
}
"""Bytes of a value, for types of fixed width."""
SIZED = frozenset(b"SxAF")
"""Types whose values start with their own length in four bytes."""

_UNKNOWN, _OWN_LENGTH = 0, -1
# Type byte to the bytes of type byte and value, because every header of every message needs this lookup.
_WIDTHS = tuple(1 + SIZES[kind] if kind in SIZES else _OWN_LENGTH if kind in SIZED else _UNKNOWN for kind in range(256))

# Numbers as struct formats. Some clients write L for l.
_NUMBERS: dict[int, struct.Struct] = {
    ord(kind): struct.Struct(">" + code)
    for kind, code in {
        "b": "b", "B": "B", "s": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q", "f": "f", "d": "d",
    }.items()
}  # fmt: skip
_NEGATIVE = {
    ord(kind): (_NUMBERS[ord(kind)], struct.Struct(">B" + _NUMBERS[ord(signed)].format[1:]), ord(signed))
    for kind, signed in zip("bsIlLBui", "bsIlLsIl", strict=True)
}
"""For each integer type the struct of its value, then struct and type byte of the signed type for its negation."""
_U32 = struct.Struct(">I")
_DECIMAL = struct.Struct(">Bi")
_MAX_INT64 = (1 << 63) - 1

# The nesting limit: deeper than people nest by hand, and safe for Python's stack and for printing.
MAX_DEPTH = 64

Value = int | float | bool | str | bytes | Decimal | None | list["Value"] | dict[str, "Value"]


def end_of_value(buffer: bytes, at: int, end: int) -> int:
    """Find the end of the value whose type byte is at ``at``. Raises MalformedTable if that is past ``end``."""
    if at >= end:
        raise MalformedTable(f"expected a value at offset {at}, found the end of the table")
    size = _WIDTHS[buffer[at]]
    if size == _OWN_LENGTH:
        size = 5 + int.from_bytes(buffer[at + 1 : at + 5], "big")
    elif size == _UNKNOWN:
        raise MalformedTable(f"unknown field type {buffer[at]:#04x} at offset {at}")
    stop = at + size
    if stop > end:
        raise MalformedTable(f"the value at offset {at} ends {stop - end} bytes beyond its table")
    return stop


def entries(
    buffer: bytes, start: int, end: int, wanted: Collection[bytes] | None = None
) -> list[tuple[bytes, int, int]]:
    """List a table's entries as (name, offset of the type byte, end); the table's content is ``buffer[start:end]``. If
    ``wanted`` is not None, list only entries with these names. Raises MalformedTable if the bytes are not exactly a
    sequence of entries, but does not check inside values."""
    found = []
    at = start
    widths, length = _WIDTHS, _U32.unpack_from
    while at < end:
        type_at = at + 1 + buffer[at]
        # A value that has a fixed width or its length, and fits, needs no call, which halves the time of the loop.
        stop = type_at + widths[buffer[type_at]] if type_at < end else at
        if stop < type_at and type_at + 5 <= end:
            stop = type_at + 5 + length(buffer, type_at + 1)[0]
        if not type_at < stop <= end:
            stop = end_of_value(buffer, type_at, end)
        name = buffer[at + 1 : type_at]
        if wanted is None or name in wanted:
            found.append((name, type_at, stop))
        at = stop
    return found


def value_at(buffer: bytes, at: int, end: int, depth: int = MAX_DEPTH) -> Value:  # noqa: PLR0911 - one for each type
    """Decode an entry of :func:`entries`. ``S`` becomes str if it is UTF-8, else bytes; ``T`` a Timestamp; ``V`` None.
    Raises MalformedTable for a malformed table inside, or one more than ``depth`` levels deep."""
    kind = buffer[at]
    number = _NUMBERS.get(kind)
    if number is not None:
        found: int | float = number.unpack_from(buffer, at + 1)[0]
        return found
    match chr(kind):
        case "S":
            text = buffer[at + 5 : end]
            try:
                return text.decode()
            except UnicodeDecodeError:
                return text
        case "x":
            return buffer[at + 5 : end]
        case "t":
            return buffer[at + 1] != 0
        case "T":
            return Timestamp(int.from_bytes(buffer[at + 1 : end], "big"))
        case "D":
            # The specification's grammar says unsigned, its text says signed. Only a signed value can be negated.
            scale, unscaled = _DECIMAL.unpack_from(buffer, at + 1)
            return Decimal(unscaled).scaleb(-scale)
        case "V":
            return None
        case "A" | "F" if depth == 0:
            raise MalformedTable(f"nested deeper than {MAX_DEPTH} levels")
        case "A":
            return [value_at(buffer, first, stop, depth - 1) for first, stop in _elements(buffer, at + 5, end)]
        case _:
            return {
                name.decode("utf-8", "surrogateescape"): value_at(buffer, type_at, stop, depth - 1)
                for name, type_at, stop in entries(buffer, at + 5, end)
            }


def _elements(buffer: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """The span of each value, type byte included, of an array with the content ``buffer[at:end]``."""
    while at < end:
        stop = end_of_value(buffer, at, end)
        yield at, stop
        at = stop


def negated(kind: int, raw: bytes) -> bytes:
    """Negate a positive number or numeric string; returns type byte and value. Unsigned integers widen to the next
    signed type. A string changes only its sign."""
    if kind in _NEGATIVE:
        value, type_and_value, signed = _NEGATIVE[kind]
        return type_and_value.pack(signed, -value.unpack(raw)[0])
    if kind in b"fd":
        return bytes((kind, raw[0] | 0x80)) + raw[1:]
    if kind == ord("D"):
        scale, unscaled = _DECIMAL.unpack(raw)
        return b"D" + _DECIMAL.pack(scale, -unscaled)
    return long_string(b"-" + raw[4:].removeprefix(b"+"))


def sized(kind: bytes, content: bytes) -> bytes:
    """Encode type and value of a field that starts with its length: ``S`` string, ``x`` bytes, ``F`` table of encoded
    entries, ``A`` array of encoded values, each with its type."""
    return kind + _U32.pack(len(content)) + content


def long_string(content: bytes) -> bytes:
    """Encode type and value of a string field (``S``)."""
    return sized(b"S", content)


def byte_array(content: bytes) -> bytes:
    """Encode type and value of a byte array field (``x``)."""
    return sized(b"x", content)


def timestamp(seconds: int) -> bytes:
    """Encode type and value of a timestamp field (``T``). Raises OverflowError beyond an unsigned 64-bit number."""
    return b"T" + seconds.to_bytes(8, "big")


def elements(raw: bytes) -> list[bytes]:
    """Split an array's content into its values, each encoded with its type. Raises MalformedTable."""
    return [raw[at:stop] for at, stop in _elements(raw, 0, len(raw))]


def int64(value: int) -> bytes:
    """Encode type and value of an int64 field (``l``). Raises ValueError outside its range."""
    if not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
        raise ValueError(f"{value} does not fit 64 bits")
    return b"l" + value.to_bytes(8, "big", signed=True)


def entry(name: bytes, type_and_value: bytes) -> bytes:
    """Encode a table entry. Raises ValueError if the name is longer than 255 bytes."""
    if len(name) > 255:
        raise ValueError(f"a header name holds 255 bytes, found {len(name)}")
    return bytes((len(name),)) + name + type_and_value


_SHORT, _TABLE = 0, -1  # Values of these kinds start with their length; the other kinds are widths in bytes.
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
_OURS = FLAGS["headers"] | FLAGS["delivery_mode"]
_FLAGS_AND_LENGTH = struct.Struct(">HI")


@lru_cache(maxsize=1 << 14)
def _layout(flags: int) -> tuple[Mapping[str, int], tuple[int, ...]]:
    """Places and kinds of the properties that ``flags`` announce. A fleet uses few of the 16,384 combinations."""
    if flags & 0b11:
        raise MalformedProperties(f"undefined property flags in {flags:#06x}")
    present = [(name, kind) for name, kind in _LAYOUT if flags & FLAGS[name]]
    return {name: place for place, (name, _) in enumerate(present)}, tuple(kind for _, kind in present)


class Field(NamedTuple):
    """One entry of a header table: ``name``, ``type`` (its byte), and its value's span in ``buffer``."""

    name: bytes
    type: int
    start: int
    end: int
    buffer: bytes

    @property
    def type_and_value(self) -> bytes:
        """The bytes of type and value, for :func:`entry`."""
        return self.buffer[self.start - 1 : self.end]

    @property
    def content(self) -> bytes:
        """The value's bytes without type and length, such as the characters of a string."""
        return self.buffer[self.start + 4 if self.type in SIZED else self.start : self.end]

    @property
    def value(self) -> Value:
        """The decoded value. Raises MalformedTable for a malformed or too deeply nested table inside."""
        return value_at(self.buffer, self.start - 1, self.end)

    def tables(self) -> Iterator[Value]:
        """Decode the tables of an array, one at a time; of another type none. Raises MalformedTable."""
        if self.type == ord("A"):
            for at, stop in _elements(self.buffer, self.start + 4, self.end):
                if self.buffer[at] == ord("F"):
                    yield value_at(self.buffer, at, stop, MAX_DEPTH - 1)


@dataclass(slots=True, eq=False)
class Properties:
    """Properties with the bounds of their values in ``raw``. The header table is only parsed on access. ``places`` maps
    the name of each present property to its place: the encoded value, length included, starts at that entry of
    ``bounds`` and ends at the next."""

    raw: bytes
    places: Mapping[str, int]
    bounds: list[int]

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Find the bounds. Raises MalformedProperties unless flags and values fill ``raw`` exactly. This does not check
        inside the header table; each access to a malformed table raises MalformedTable."""
        length = len(raw)
        if length < 2:
            raise MalformedProperties(f"properties have at least 2 bytes of flags, found {length}")
        places, kinds = _layout(raw[0] << 8 | raw[1])
        at = 2
        bounds = [at]
        try:
            for kind in kinds:
                if kind == _SHORT:
                    at += 1 + raw[at]
                elif kind == _TABLE:
                    at += 4 + _U32.unpack_from(raw, at)[0]
                else:
                    at += kind
                bounds.append(at)
        except (IndexError, struct.error) as cut:
            raise MalformedProperties(f"the property list is cut short at offset {at} of {length}") from cut
        if at != length:
            raise MalformedProperties(f"the properties announced take {at} bytes, found {length}")
        return cls(raw, places, bounds)

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The span of each present property, in order."""
        return dict(zip(self.places, pairwise(self.bounds), strict=True))

    def entries(self, wanted: Collection[bytes] | None = None) -> list[tuple[bytes, int, int]]:
        """The table's own entries (with these names) as (name, offset of the type byte, end). Raises MalformedTable."""
        place = self.places.get("headers")
        if place is None:
            return []
        return entries(self.raw, self.bounds[place] + 4, self.bounds[place + 1], wanted)

    def names(self) -> list[bytes]:
        """The names of the table's own entries. Raises MalformedTable."""
        return [name for name, _, _ in self.entries()]

    def headers_items(self, wanted: Collection[bytes] | None = None) -> list[Field]:
        """The table's own entries (with these names) in order, including duplicates. Raises MalformedTable."""
        raw = self.raw
        return [Field(name, raw[type_at], type_at + 1, stop, raw) for name, type_at, stop in self.entries(wanted)]

    def first_headers(self, most: int, most_bytes: int) -> tuple[list[Field], int]:
        """Those of the first ``most`` entries that fit into ``most_bytes`` together, and how many bytes of the table
        they leave out. Reads no further, so it may not notice a malformed table. Raises MalformedTable."""
        place, raw, found = self.places.get("headers"), self.raw, list[Field]()
        if place is None:
            return found, 0
        at, end, room = self.bounds[place] + 4, self.bounds[place + 1], most_bytes
        left_out = end - at
        for _ in range(most):
            if at == end:
                break
            type_at = at + 1 + raw[at]
            stop = end_of_value(raw, type_at, end)
            if stop - at <= room:
                found.append(Field(raw[at + 1 : type_at], raw[type_at], type_at + 1, stop, raw))
                room -= stop - at
                left_out -= stop - at
            at = stop
        return found, left_out

    def get(self, name: bytes) -> Field | None:
        """The first header of that name. Raises MalformedTable if any part of the table is malformed."""
        for _, type_at, stop in self.entries((name,)):
            return Field(name, self.raw[type_at], type_at + 1, stop, self.raw)
        return None

    def short(self, name: str) -> bytes | None:
        """The content of a short-string property, such as ``message_id``; None if it is missing."""
        place = self.places.get(name)
        return None if place is None else self.raw[self.bounds[place] + 1 : self.bounds[place + 1]]

    @property
    def timestamp(self) -> int | None:
        """Seconds since the epoch, 0 to 2**64 - 1."""
        place = self.places.get("timestamp")
        return None if place is None else int.from_bytes(self.raw[self.bounds[place] : self.bounds[place + 1]], "big")


Cut = tuple[int, int, bytes]
"""A span of the raw bytes, and its replacement."""


def parsed(raw: bytes) -> Properties | None:
    """Parse properties; None if their bytes or the header table are malformed."""
    try:
        properties = Properties.parse(raw)
        properties.entries()
    except (MalformedProperties, MalformedTable):
        return None
    return properties


def decoded(properties: Properties | None, names: Iterable[bytes]) -> dict[bytes, object]:
    """Decode the first header of each of these names, skipping malformed values."""
    found: dict[bytes, object] = {}
    if properties is None:
        return found
    for name, type_at, stop in properties.entries(frozenset(names)):
        if name not in found:
            with suppress(MalformedTable):
                found[name] = value_at(properties.raw, type_at, stop)
    return found


def splice(
    properties: bytes | Properties,
    *,
    remove: Collection[bytes] = (),
    remove_prefixes: tuple[bytes, ...] = (),
    append: bytes = b"",
    drop: Collection[str] = (),
) -> bytes:
    """Edit the properties; every other byte stays unchanged. Raises MalformedProperties, and MalformedTable if an edit
    needs the entries of a malformed table.

    ``remove`` and ``remove_prefixes`` delete every header of such a name. ``append`` is encoded entries for the end of
    the table, which need not exist yet. ``drop`` deletes properties; unknown names raise ValueError. Keeps an empty
    table."""
    found = properties if isinstance(properties, Properties) else Properties.parse(properties)
    if drop:
        found = Properties.parse(changed(found, {}, drop))
    cuts: list[Cut] = []
    if remove or remove_prefixes:
        cuts = [
            (type_at - 1 - len(name), stop, b"")
            for name, type_at, stop in found.entries(None if remove_prefixes else remove)
            if name in remove or name.startswith(remove_prefixes)
        ]
    return edited(found, cuts, append)


def changed(properties: Properties, values: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """Set these encoded ``values``, and delete the properties of ``drop``."""
    for name in drop:
        if name not in FLAGS:
            raise ValueError(f"expected a property of {', '.join(NAMES)}, found {name!r}")
    spans = properties.spans.items()
    present = {name: properties.raw[start:stop] for name, (start, stop) in spans if name not in drop}
    present |= values
    flags = sum(FLAGS[name] for name in present)
    return flags.to_bytes(2, "big") + b"".join(present[name] for name in NAMES if name in present)


def edited(properties: Properties, cuts: Sequence[Cut], append: bytes) -> bytes:
    """Apply ``cuts`` inside the header table, in their order, and append entries at its end."""
    if not (cuts or append):
        return properties.raw
    raw, place = properties.raw, properties.places.get("headers")
    if place is None:
        return changed(properties, {"headers": _U32.pack(len(append)) + append})
    start, stop = properties.bounds[place], properties.bounds[place + 1]
    copied = start + 4
    parts: list[bytes] = []
    for first, end, instead in cuts:
        parts += (raw[copied:first], instead)
        copied = end
    table = b"".join((*parts, raw[copied:stop], append))
    return b"".join((raw[:start], _U32.pack(len(table)), table, raw[stop:]))


def encode_headers(headers: bytes = b"") -> bytes:
    """Build properties of our own persistent message, with a table of the encoded entries."""
    return _FLAGS_AND_LENGTH.pack(_OURS, len(headers)) + headers + b"\2"
