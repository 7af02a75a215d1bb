"""An instant somewhere in a JSON body, by RFC 6901 pointer. Pure.

MailerQ writes ``{"nextattempt": {"time": "2026-11-21 22:30:00"}}``: its pointer is ``/nextattempt/time``, its times are
UTC. Bodies may be compressed by gzip, where the content encoding says so.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, Final

from delayer.core.delay import UnreadableDelay, read_instant_ms, shown

LONGEST_BODY: Final = 64 << 20
"""Bytes of an unpacked body: a few kilobytes may unpack to gigabytes."""
_GZIP_ONLY: Final = 16 + zlib.MAX_WBITS
_MISSING: Final = object()


def steps(pointer: str) -> tuple[str, ...]:
    """The parts of a pointer. Raises ValueError for what is none.

    >>> steps("/nextattempt/time"), steps("/a~1b/~0"), steps("")
    (('nextattempt', 'time'), ('a/b', '~'), ())
    """
    if pointer and not pointer.startswith("/"):
        raise ValueError(f'expected a JSON pointer such as "/nextattempt/time", found {shown(pointer)}')
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


def instant_in_json_ms(body: bytes, pointer: str, encoding: bytes | None = None) -> int | None:
    """The instant that the pointer leads to, in epoch ms, rounded up; None where there is nothing, or null.

    RFC 3339, the same without a zone (UTC then), or integer epoch milliseconds. A body that is no JSON may have been
    meant to say an instant, so that is not "nothing". Raises UnreadableDelay.
    """
    value = _at(_parsed(body, encoding), steps(pointer))
    if value is _MISSING or value is None:
        return None
    for spelled in (value, f"{value}Z") if isinstance(value, str) else (value,):
        try:
            return read_instant_ms(spelled)
        except UnreadableDelay:
            continue
    raise UnreadableDelay(
        f"expected an instant in RFC 3339, the same without a zone in UTC, or integer epoch milliseconds, "
        f"found {shown(value)}"
    )


def _parsed(body: bytes, encoding: bytes | None) -> Any:
    plain = _unpacked(body) if encoding is not None and encoding.lower() in (b"gzip", b"x-gzip") else body
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError; so is an integer of 5,000 digits
        raise UnreadableDelay(f"expected a JSON body, found {shown(plain[:40])}") from None


def _unpacked(body: bytes) -> bytes:
    unpacking = zlib.decompressobj(_GZIP_ONLY)
    try:
        plain = unpacking.decompress(body, LONGEST_BODY)
    except zlib.error as error:
        raise UnreadableDelay(f"expected a body in gzip, found other bytes: {error}") from error
    if not unpacking.eof:
        raise UnreadableDelay(f"expected a whole body in gzip of at most {LONGEST_BODY} bytes, found more, or less")
    return plain


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isascii() and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return _MISSING
    return value
