"""Messages as lines of JSON: what `delayer export` writes and `delayer import jsonl` reads. Exact to the byte. Pure.

A line is an object; a program that writes such lines may leave out what has a default::

    {"v": 1, "due_ms": 1795604393876, "route": "mail.in", "exchange": "mail.in", "routing_key": "outbox",
     "to_exchange": "mail.out", "to_key": "outbox", "key": "order-7", "properties_b64": "EAAC", "body": "hello",
     "crc": 3735928559, "token": "30a6aca3c8ea4ae8a9a83c9bd2a3c2ab",
     "held": {"kind": "nacked", "text": "nacked", "may_be_delivered": true, "isolated": false}}

Byte strings that are not UTF-8 stand under their name with ``_b64`` behind it, in base64. ``properties_b64`` is the
payload of the content header after class, weight and body size; the default is a persistent message without any.
Other fields are not taken: a misspelt one would be a message without its body. ``crc`` is the store's checksum over
exchange, routing key, properties and body: a line whose bytes do not fit it is held, not sent. ``token``, only beside
``held`` (core/hold.py), is the ``x-delayer-id`` of a message that was published before it was held: its copies are
known by it. The last line,
``{"v": 1, "messages": 1000}``, says how many there are, so that a cut file is seen.

The rule for changing this is envelope.py's: never change what a released version means, and read all of them for ever.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import re
from dataclasses import asdict
from typing import Any, Final, NamedTuple

from delayer.core.hold import Hold, HoldKind
from delayer.core.message import SHORT_STRING, Parcel, Target

VERSION: Final = 1
PERSISTENT: Final = b"\x10\x00\x02"
_NAMES: Final = ("route", "exchange", "routing_key", "to_exchange", "to_key", "key", "body")
_FIELDS: Final = frozenset(
    ("v", "due_ms", *_NAMES, *(f"{name}_b64" for name in (*_NAMES, "properties", "token")), "crc", "held", "token")
)
_HELD_FIELDS: Final = frozenset(("kind", "text", "may_be_delivered", "isolated"))
_END_FIELDS: Final = frozenset(("v", "messages"))


class NotALine(ValueError):
    """A line that is none of this format. The message says what was expected and found."""


class Line(NamedTuple):
    """A message, its checksum where the line says one, and why it was held, where it was."""

    parcel: Parcel
    crc: int | None = None
    held: Hold | None = None


class End(NamedTuple):
    """The last line."""

    messages: int


def write(line: Line) -> bytes:
    """One line, with its end."""
    parcel = line.parcel
    said: dict[str, Any] = {"v": VERSION, "due_ms": parcel.due_ms}
    values = (
        parcel.route, parcel.exchange, parcel.routing_key, parcel.target.exchange, parcel.target.routing_key,
        parcel.key, parcel.body,
    )  # fmt: skip
    for name, value in zip(_NAMES, values, strict=True):
        if value is not None:
            _put(said, name, value)
    said["properties_b64"] = base64.b64encode(parcel.properties).decode()
    if line.crc is not None:
        said["crc"] = line.crc
    if line.held is not None:
        said["held"] = asdict(line.held)
        if parcel.token:
            _put(said, "token", parcel.token)
    return _dumped(said)


def write_end(messages: int) -> bytes:
    return _dumped({"v": VERSION, "messages": messages})


def _dumped(said: dict[str, Any]) -> bytes:
    return escaped(json.dumps(said, ensure_ascii=False, separators=(",", ":"))).encode() + b"\n"


def _put(said: dict[str, Any], name: str, value: bytes) -> None:
    try:
        said[name] = value.decode()
    except UnicodeDecodeError:
        said[f"{name}_b64"] = base64.b64encode(value).decode()


def read(text: bytes) -> Line | End:
    """The message that a line says, or the end. Raises NotALine."""
    try:
        said = json.loads(text)
    except ValueError as error:
        raise NotALine(f"expected a JSON object, found something else: {error}") from None
    except RecursionError:
        raise NotALine("expected a JSON object, found one that is nested too deeply") from None
    if not isinstance(said, dict):
        raise NotALine(f"expected a JSON object, found {_kind(said)}")
    if said.get("v") != VERSION:
        raise NotALine(f"expected version {VERSION} of the format, found {said.get('v')!r}")
    if "messages" in said and "due_ms" not in said:
        _known(said, _END_FIELDS)
        return End(_integer(said, "messages"))
    _known(said, _FIELDS)
    exchange, routing_key = _get(said, "exchange", b""), _get(said, "routing_key", b"")
    parcel = Parcel(
        _integer(said, "due_ms"),
        _get(said, "route", b""),
        exchange,
        routing_key,
        Target(_get(said, "to_exchange", exchange), _get(said, "to_key", routing_key)),
        _properties(said),
        _get(said, "body", b"", SHORT_STRING << 32),
        _get(said, "key", b"") if "key" in said or "key_b64" in said else None,
        _get(said, "token", b""),
    )
    crc = _integer(said, "crc") if "crc" in said else None
    held = _hold(said["held"]) if "held" in said else None
    if parcel.token and held is None:
        raise NotALine("token: expected beside held, found without it")
    return Line(parcel, crc, held)


def _hold(said: object) -> Hold:
    if not isinstance(said, dict):
        raise NotALine(f"held: expected an object, found {_kind(said)}")
    _known(said, _HELD_FIELDS)
    kind, text = said.get("kind"), said.get("text", "")
    if kind not in tuple(HoldKind):
        raise NotALine(f"held.kind: expected one of {', '.join(HoldKind)}, found {kind!r}")
    if not isinstance(text, str):
        raise NotALine(f"held.text: expected a string, found {_kind(text)}")
    flags = [said.get(name, False) for name in ("may_be_delivered", "isolated")]
    if not all(type(flag) is bool for flag in flags):
        raise NotALine("held: expected true or false for may_be_delivered and isolated, found something else")
    return Hold(HoldKind(kind), text, *flags)


def _known(said: dict[str, Any], fields: frozenset[str]) -> None:
    """Raises NotALine for a field that has no meaning, and for one that is there in both of its ways."""
    for name in said:
        if name not in fields:
            near = difflib.get_close_matches(name, sorted(fields), 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(fields))}"
            raise NotALine(f"expected a known field, found {name!r} ({hint})")
        if name.endswith("_b64") and (plain := name.removesuffix("_b64")) in said:
            raise NotALine(f"expected {plain} or {name}, found both")


def _properties(said: dict[str, Any]) -> bytes:
    return _base64(said, "properties_b64") if "properties_b64" in said else PERSISTENT


def _get(said: dict[str, Any], name: str, default: bytes, longest: int = SHORT_STRING) -> bytes:
    if f"{name}_b64" in said:
        value = _base64(said, f"{name}_b64")
    elif name not in said:
        return default
    elif isinstance(said[name], str):
        try:
            value = said[name].encode()
        except UnicodeEncodeError:
            raise NotALine(f"{name}: expected characters, found half of one; other bytes go into {name}_b64") from None
    else:
        raise NotALine(f"{name}: expected a string, found {_kind(said[name])}")
    if len(value) > longest:
        raise NotALine(f"{name}: expected at most {longest} bytes, found {len(value)}")
    return value


def _base64(said: dict[str, Any], name: str) -> bytes:
    value = said[name]
    if not isinstance(value, str):
        raise NotALine(f"{name}: expected a string, found {_kind(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise NotALine(f"{name}: expected base64, found something else") from None


def _integer(said: dict[str, Any], name: str) -> int:
    value = said.get(name)
    if type(value) is not int:
        raise NotALine(f"{name}: expected an integer, found {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


_UNPRINTED: Final = re.compile("[^\n -~]")


def escaped(text: str) -> str:
    r"""The same JSON with what does not print (DEL, C1 controls, marks that turn the direction) as ``\uXXXX``.

    Such characters stand in strings only, where the two spellings mean the same; ours end lines between them.

    >>> escaped('"a\u202eb\x9b"')
    '"a\\u202eb\\u009b"'
    """
    return _UNPRINTED.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
