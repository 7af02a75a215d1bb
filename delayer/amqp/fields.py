"""Field values: the typed values in header tables. Skipping needs no recursion; decoding is done on demand only.

A *kind* is the type byte. *raw* is everything after it: for ``S``, ``x``, ``A`` and ``F`` that includes the four length
bytes. The types are RabbitMQ's: ``b B s u I i l L f d`` numbers, ``D`` decimal, ``t`` bool, ``T`` timestamp, ``S`` and
``x`` bytes, ``A`` array, ``F`` table, ``V`` void.
"""

from __future__ import annotations

import re
import struct
from decimal import Decimal

from delayer.amqp.errors import MalformedTable
from delayer.core.message import Timestamp

SIZES: dict[int, int] = {
    ord(kind): size
    for size, kinds in {0: "V", 1: "tbB", 2: "su", 4: "Iif", 5: "D", 8: "lLdT"}.items()
    for kind in kinds
}
"""Bytes of a value, for the kinds of fixed width."""
SIZED = frozenset(b"SxAF")
"""Kinds that begin with their own length, four bytes."""

_UNKNOWN, _OWN_LENGTH = 0, -1
# Type byte to bytes that the type byte and its value take; looked up for every header of every message.
_WIDTHS = tuple(1 + SIZES[kind] if kind in SIZES else _OWN_LENGTH if kind in SIZED else _UNKNOWN for kind in range(256))

# Numbers as struct formats. L is what some clients call l.
_NUMBERS: dict[int, struct.Struct] = {
    ord(kind): struct.Struct(">" + code)
    for kind, code in {
        "b": "b", "B": "B", "s": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q", "f": "f", "d": "d",
    }.items()
}  # fmt: skip
_SIGNED = {kind: (_NUMBERS[kind], struct.Struct(">B" + _NUMBERS[kind].format[1:])) for kind in b"bsIlL"}
"""Signed integers: the struct of the value, and of type byte and value."""
_WIDER = {ord("b"): ord("s"), ord("s"): ord("I"), ord("I"): ord("l"), ord("B"): ord("s"), ord("u"): ord("I"),
          ord("i"): ord("l")}  # fmt: skip
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_DECIMAL = struct.Struct(">Bi")
_MAX_INT64 = (1 << 63) - 1
_NUMERIC = re.compile(rb"\s*([+-]?)((?:[0-9]|\.[0-9]).*)", re.DOTALL)

# Deep enough for anything a person wrote, shallow enough for Python's stack and for whoever prints the result.
MAX_DEPTH = 64

Value = int | float | bool | str | bytes | Decimal | None | list["Value"] | dict[str, "Value"]


def end_of_value(buffer: bytes, at: int, end: int) -> int:
    """Where the value ends whose type byte stands at ``at``. Raises MalformedTable if that is beyond ``end``."""
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


def entries(buffer: bytes, start: int, end: int) -> list[tuple[bytes, int, int]]:
    """The entries of a table whose content is ``buffer[start:end]``: (name, offset of the type byte, end).

    Raises MalformedTable if the bytes do not add up to exactly that many entries. Nothing inside a value is looked at.
    """
    found = []
    at = start
    widths = _WIDTHS
    while at < end:
        type_at = at + 1 + buffer[at]
        # Nearly every value has a fixed width and fits: then no call is needed, which halves the time of this loop.
        stop = type_at + widths[buffer[type_at]] if type_at < end else at
        if not type_at < stop <= end:
            stop = end_of_value(buffer, type_at, end)
        found.append((buffer[at + 1 : type_at], type_at, stop))
        at = stop
    return found


def value_at(buffer: bytes, type_at: int, stop: int) -> Value:
    """The Python value of an entry that :func:`entries` found; see :func:`decode`."""
    return _decode(buffer, type_at, stop, MAX_DEPTH)


def decode(kind: int, raw: bytes) -> Value:
    """The Python value of ``raw``. ``S`` gives str if it is UTF-8, else bytes; ``T`` a Timestamp; ``V`` None.

    Raises MalformedTable if the bytes are no such value, or nested deeper than 64 levels.
    """
    whole = bytes((kind,)) + raw
    if end_of_value(whole, 0, len(whole)) != len(whole):
        raise MalformedTable(f"{len(raw)} bytes are too many for a value of type {chr(kind)!r}")
    return _decode(whole, 0, len(whole), MAX_DEPTH)


def _decode(buffer: bytes, at: int, end: int, depth: int) -> Value:  # noqa: PLR0911 - one return for each type
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
            return Timestamp(_U64.unpack_from(buffer, at + 1)[0])
        case "D":
            # The specification says unsigned in its grammar and signed in its prose; only signed can be negated.
            scale, unscaled = _DECIMAL.unpack_from(buffer, at + 1)
            return Decimal(unscaled).scaleb(-scale)
        case "V":
            return None
        case "A" | "F" if depth == 0:
            raise MalformedTable(f"nested deeper than {MAX_DEPTH} levels")
        case "A":
            return _array(buffer, at + 5, end, depth - 1)
        case _:
            return {
                name.decode("utf-8", "surrogateescape"): _decode(buffer, type_at, stop, depth - 1)
                for name, type_at, stop in entries(buffer, at + 5, end)
            }


def _array(buffer: bytes, at: int, end: int, depth: int) -> list[Value]:
    found = []
    while at < end:
        stop = end_of_value(buffer, at, end)
        found.append(_decode(buffer, at, stop, depth))
        at = stop
    return found


def negated_if_positive(buffer: bytes, type_at: int) -> bytes | None:
    """Type byte and value with the sign turned, of the whole, positive, signed integer at ``type_at``; else None.

    That is what nearly every delay is, and then it takes a third of the time of :func:`negated`.
    """
    found = _SIGNED.get(buffer[type_at])
    if found is None:
        return None
    value, type_and_value = found
    number = value.unpack_from(buffer, type_at + 1)[0]
    return type_and_value.pack(buffer[type_at], -number) if number > 0 else None


def negated(kind: int, raw: bytes) -> bytes:
    """Type byte and value with the sign turned, in the same type where that can hold it.

    Unsigned integers and the least value of a signed type widen to the next signed type; the least int64 saturates.
    A numeric string changes by its sign only. Raises ValueError for what is no number, MalformedTable for broken bytes.
    """
    number = _NUMBERS.get(kind)
    value = number.unpack(raw)[0] if number is not None and number.size == len(raw) else decode(kind, raw)
    type_and_value = bytes((kind,)) + raw
    if kind in b"fd":
        return bytes((kind, raw[0] ^ 0x80)) + raw[1:]
    if kind == ord("S"):
        return b"S" + _sized(_negated_text(raw[4:]))
    if kind == ord("D"):
        scale, unscaled = _DECIMAL.unpack(raw)
        return b"D" + _DECIMAL.pack(scale, min(-unscaled, (1 << 31) - 1))
    if kind not in _NUMBERS or not isinstance(value, int):
        raise ValueError(f"a value of type {chr(kind)!r} has no sign")
    if value == 0:
        return type_and_value
    return _packed(kind, -value)


def _packed(kind: int, value: int) -> bytes:
    if kind in b"lL":
        return bytes((kind,)) + _NUMBERS[kind].pack(min(value, _MAX_INT64))
    bits = 8 * SIZES[kind] - 1
    signed = kind in b"bsI"
    if signed and value < 1 << bits:
        return bytes((kind,)) + _NUMBERS[kind].pack(value)
    return _packed(_WIDER[kind], value)


def _negated_text(text: bytes) -> bytes:
    found = _NUMERIC.fullmatch(text)
    if found is None:
        raise ValueError("the string is no number")
    sign, digits = found.groups()
    return digits if sign == b"-" else b"-" + digits


def _sized(content: bytes) -> bytes:
    return _U32.pack(len(content)) + content


def long_string(content: bytes) -> bytes:
    """Type and value of a string field (``S``)."""
    return b"S" + _sized(content)


def byte_array(content: bytes) -> bytes:
    """Type and value of a byte array field (``x``)."""
    return b"x" + _sized(content)


def timestamp(seconds: int) -> bytes:
    """Type and value of a timestamp field (``T``). Raises OverflowError for what is no unsigned 64-bit number."""
    return b"T" + seconds.to_bytes(8, "big")


def table(content: bytes) -> bytes:
    """Type and value of a table (``F``) of these encoded entries."""
    return b"F" + _sized(content)


def array(content: bytes) -> bytes:
    """Type and value of an array (``A``) of these encoded values, each with its type."""
    return b"A" + _sized(content)


def elements(raw: bytes) -> list[bytes]:
    """The values in an array's content, each encoded with its type. Raises MalformedTable."""
    found, at = [], 0
    while at < len(raw):
        stop = end_of_value(raw, at, len(raw))
        found.append(raw[at:stop])
        at = stop
    return found


def int64(value: int) -> bytes:
    """Type and value of an int64 field (``l``). Raises ValueError beyond its range."""
    if not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
        raise ValueError(f"{value} does not fit 64 bits")
    return b"l" + value.to_bytes(8, "big", signed=True)


def boolean(value: bool) -> bytes:
    """Type and value of a boolean field (``t``)."""
    return b"t" + bytes((value,))


def entry(name: bytes, type_and_value: bytes) -> bytes:
    """One table entry. Raises ValueError if the name is longer than 255 bytes."""
    if len(name) > 255:
        raise ValueError(f"a header name holds 255 bytes, found {len(name)}")
    return bytes((len(name),)) + name + type_and_value
