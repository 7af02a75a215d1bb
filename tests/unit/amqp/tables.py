"""Header tables and properties as bytes: examples of every field type, and hypothesis strategies."""

from __future__ import annotations

import struct
from decimal import Decimal

from hypothesis import strategies as st

from delayer.amqp.errors import MalformedTable
from delayer.amqp.properties import FLAGS, Properties, Value, changed, end_of_value, entry, long_string, value_at
from delayer.amqp.values import Timestamp


def sized(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


def text(name: str, value: str = "v") -> bytes:
    """A header with a string."""
    return entry(name.encode(), long_string(value.encode()))


def with_short(raw: bytes, name: str, value: bytes) -> bytes:
    """Add this short string to the properties."""
    return changed(Properties.parse(raw), {name: bytes((len(value),)) + value})


def with_headers(*entries: bytes) -> bytes:
    """Properties with a header table only."""
    return b"\x20\x00" + sized(b"".join(entries))


# Type, raw value, and decoded value: small, large and unusual values of every type that RabbitMQ knows.
EVERY_TYPE: list[tuple[str, bytes, Value]] = [
    ("b", b"\x80", -128),
    ("B", b"\xff", 255),
    ("s", struct.pack(">h", -32768), -32768),
    ("u", struct.pack(">H", 65535), 65535),
    ("I", struct.pack(">i", 5), 5),
    ("I", struct.pack(">i", -(1 << 31)), -(1 << 31)),
    ("i", struct.pack(">I", 7), 7),
    ("i", struct.pack(">I", (1 << 32) - 1), (1 << 32) - 1),
    ("l", struct.pack(">q", 3), 3),
    ("l", struct.pack(">q", -(1 << 63)), -(1 << 63)),
    ("f", struct.pack(">f", 0.5), 0.5),
    ("d", struct.pack(">d", 0.1), 0.1),
    ("d", struct.pack(">d", float("inf")), float("inf")),
    ("D", struct.pack(">Bi", 2, 12345), Decimal("123.45")),
    ("D", struct.pack(">Bi", 255, 1), Decimal(1).scaleb(-255)),
    ("t", b"\x01", True),
    ("t", b"\x00", False),
    ("T", struct.pack(">Q", 1 << 33), Timestamp(1 << 33)),
    ("V", b"", None),
    ("S", sized("grün".encode()), "grün"),
    ("S", sized(b"\xff\xfe"), b"\xff\xfe"),
    ("S", sized(b""), ""),
    ("x", sized(b"\x00\x01"), b"\x00\x01"),
    ("A", sized(b"I" + struct.pack(">i", 1) + b"t\x01" + b"A" + sized(b"V")), [1, True, [None]]),
    ("A", sized(b""), []),
    ("F", sized(entry(b"a", b"B\x01") + entry(b"b", b"F" + sized(entry(b"c", b"V")))), {"a": 1, "b": {"c": None}}),
    ("F", sized(b""), {}),
]


def table_of_every_type() -> bytes:
    return b"".join(entry(b"h%d" % at, kind.encode() + raw) for at, (kind, raw, _) in enumerate(EVERY_TYPE))


def nested(levels: int, kind: bytes = b"A") -> bytes:
    """Type and value of an array in an array in an array, or tables with empty names."""
    name = b"" if kind == b"A" else b"\0"
    pieces: list[bytes] = []
    length = 0
    for _ in range(levels):
        pieces.append(name + kind + struct.pack(">I", length))
        length += len(pieces[-1])
    return b"".join(reversed(pieces))[len(name) :]


_FIXED = dict(zip("bBsuIilLfdDtTV", (1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 5, 1, 8, 0), strict=True))
names = st.binary(max_size=12)
_flat = st.sampled_from(sorted(_FIXED)).flatmap(
    lambda kind: st.binary(min_size=_FIXED[kind], max_size=_FIXED[kind]).map(lambda raw: kind.encode() + raw)
)
_sized = st.builds(lambda kind, content: kind + sized(content), st.sampled_from([b"S", b"x"]), st.binary(max_size=20))
values = st.recursive(
    _flat | _sized,
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda many: b"A" + sized(b"".join(many)))
        | st.lists(st.builds(entry, names, inner), max_size=4).map(lambda many: b"F" + sized(b"".join(many)))
    ),
    max_leaves=8,
)
tables = st.lists(st.builds(entry, names, values), max_size=8)

_short = st.binary(max_size=30).map(lambda content: bytes((len(content),)) + content)
_values = dict.fromkeys(FLAGS, _short) | {
    "headers": tables.map(lambda many: sized(b"".join(many))),
    "delivery_mode": st.binary(min_size=1, max_size=1),
    "priority": st.binary(min_size=1, max_size=1),
    "expiration": _short | st.integers(0, 9_999).map(lambda ms: b"\4%04d" % ms),
    "timestamp": st.binary(min_size=8, max_size=8),
}


@st.composite
def properties(draw: st.DrawFn) -> bytes:
    """Any subset of the properties, with any values."""
    flags, parts = 0, []
    for name, flag in FLAGS.items():
        if draw(st.booleans()):
            flags |= flag
            parts.append(draw(_values[name]))
    return flags.to_bytes(2, "big") + b"".join(parts)


def decode(kind: int, raw: bytes) -> Value:
    """The value of a field with this type and exactly these bytes. Raises MalformedTable."""
    whole = bytes((kind,)) + raw
    if end_of_value(whole, 0, len(whole)) != len(whole):
        raise MalformedTable("bytes behind the value")
    return value_at(whole, 0, len(whole))
