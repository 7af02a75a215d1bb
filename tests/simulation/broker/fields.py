"""The properties of a message, split into fields and headers, and joined again byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from tests.support.raw import Header, Value

HEADERS, DELIVERY_MODE, REPLY_TO, EXPIRATION, USER_ID = 2, 3, 6, 7, 11
_COUNT: Final = 14
_FIXED: Final = {3: 1, 4: 1, 9: 8}
"""The widths of delivery mode, priority and timestamp. Headers have a long length, the rest a short one."""
_WIDTHS: Final = {ord("t"): 1, ord("b"): 1, ord("B"): 1, ord("s"): 2, ord("u"): 2, ord("I"): 4, ord("i"): 4,
                  ord("l"): 8, ord("f"): 4, ord("d"): 8, ord("T"): 8, ord("D"): 5, ord("V"): 0}  # fmt: skip
_LONG: Final = struct.Struct(">I")


class Malformed(Exception):
    """Not properties, or not a table."""


Fields = list[bytes | None]
"""The 14 fields in wire order, without their lengths; None if absent."""


def split(properties: bytes) -> Fields:
    """Raises Malformed."""
    found: Fields = [None] * _COUNT
    try:
        flags = properties[0] << 8 | properties[1]
        at = 2
        for position in range(_COUNT):
            if not flags & 1 << (15 - position):
                continue
            if position in _FIXED:
                width = _FIXED[position]
            elif position == HEADERS:
                width = _LONG.unpack_from(properties, at)[0]
                at += 4
            else:
                width = properties[at]
                at += 1
            found[position] = properties[at : at + width]
            at += width
    except (IndexError, struct.error) as short:
        raise Malformed from short
    if at != len(properties) or flags & 3:
        raise Malformed
    return found


def join(fields: Fields) -> bytes:
    flags, parts = 0, [b""]
    for position, value in enumerate(fields):
        if value is None:
            continue
        flags |= 1 << (15 - position)
        if position == HEADERS:
            parts.append(_LONG.pack(len(value)))
        elif position not in _FIXED:
            parts.append(bytes((len(value),)))
        parts.append(value)
    parts[0] = flags.to_bytes(2, "big")
    return b"".join(parts)


def entries(raw: bytes | None) -> list[Header]:
    """The entries of a table, without its length. Raises Malformed."""
    found: list[Header] = []
    at, end = 0, len(raw or b"")
    while raw and at < end:
        start = at + 1 + raw[at]
        name = raw[at + 1 : start]
        at, value = _value(raw, start)
        found.append((name, value))
    return found


def items(raw: bytes) -> list[Value]:
    """The values of an array, without its length. Raises Malformed."""
    found, at = [], 0
    while at < len(raw):
        at, value = _value(raw, at)
        found.append(value)
    return found


def _value(raw: bytes, at: int) -> tuple[int, Value]:
    """The value at an offset, and the next offset."""
    try:
        width = _WIDTHS.get(raw[at], -1)
        if width < 0:
            if raw[at] not in b"SxAF":
                raise Malformed
            width = 4 + _LONG.unpack_from(raw, at + 1)[0]
    except (IndexError, struct.error) as short:
        raise Malformed from short
    end = at + 1 + width
    if end > len(raw):
        raise Malformed
    return end, Value(raw[at : at + 1], raw[at + 1 : end])


def table(headers: Iterable[Header]) -> bytes:
    """The entries in a row, without the length."""
    return b"".join([bytes((len(name),)) + name + kind + raw for name, (kind, raw) in headers])


def set_header(headers: Sequence[Header], name: bytes, value: Value) -> list[Header]:
    """Set a header as the broker does: the first of its name is replaced, and the table comes out sorted by name."""
    found = list(headers)
    at = next((at for at, header in enumerate(found) if header[0] == name), len(found))
    found[at : at + 1] = [(name, value)]
    return sorted(found, key=lambda header: header[0])


def header(headers: Sequence[Header], name: bytes) -> Value | None:
    """The first header of that name."""
    return next((value for found, value in headers if found == name), None)
