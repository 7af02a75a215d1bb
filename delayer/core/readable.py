"""Format for people: escape text from outside, and print times, durations and sizes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from delayer.core.secret import AS_PARAMETER, HIDDEN

Say = Callable[[str, int, int | None], None]
"""Reports progress: the step, the amount done, and the total if known."""
MOST_BYTES: Final = 512
"""Maximum number of bytes, and MOST of characters, that a line shows of a value."""
MOST: Final = 16_384
TOO_LONG: Final = "a number of more than 4,300 digits"
"""Stands for a number that Python neither reads nor writes."""
COUNTS_AGE: Final = 12.0
"""Maximum age of the broker's counts in seconds: two ticks of a quorum queue, and the management API's pause."""

# A password extends to the last "@" before a blank. People forget to escape "/" or "@" in a password, and the output
# must not show half of it. The price: of two URLs without a blank between them, everything up to the second "@" is
# hidden. One "/" is enough, because a URL used as a file path has lost the other.
_RUN = re.compile(r"\S+")
_AUTHORITY = re.compile(r":/+[^\s:@/?#]*:")
_UNPRINTABLE = re.compile(r"[^\x20-\x7e]")
_UNPRINTABLE_BUT_LINES = re.compile(r"[^\x20-\x7e\n\t]")


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _without_password(run: re.Match[str]) -> str:
    """Split at the last "@" first: one expression for both would read the rest of the text again for every colon."""
    before, at, rest = run[0].rpartition("@")
    found = _AUTHORITY.search(before)
    return run[0] if found is None else before[: found.end()] + HIDDEN + at + rest


def mask(text: str) -> str:
    """Replace every password by ``***``, in URLs and in ``password=…``. Use it for output of other programs, whose URLs
    contain no blanks; use :func:`concealed` for an operator's input."""
    if ":/" in text and "@" in text:
        text = _RUN.sub(_without_password, text)
    if "=" in text:
        text = AS_PARAMETER.sub(rf"\1{HIDDEN}", text)
    return text


def readable(value: str | bytes | bytearray | memoryview, *, keep_lines: bool = False) -> str:
    """Make ``value`` one printable line: escape other bytes and characters, and mask passwords."""
    if isinstance(value, bytes | bytearray | memoryview):
        whole = bytes(value)
        text, rest = whole[:MOST_BYTES].decode("utf-8", "backslashreplace"), whole[MOST_BYTES:].decode("latin-1")
        unit = "bytes"
    else:
        text, rest, unit = value[:MOST], value[MOST:], "characters"
    run = _RUN.match(rest)
    at = "@" if run is not None and "@" in run[0] else ""  # It ends a password that the cut divides.
    shown = mask(text + at).removesuffix(at) + (f"… ({len(rest)} more {unit})" if rest else "")
    return (_UNPRINTABLE_BUT_LINES if keep_lines else _UNPRINTABLE).sub(_escape, shown)


def parser_error(error: ValueError) -> str:
    """Format an error of a JSON or TOML parser, without Python's advice to a programmer about numbers of many digits.

    >>> parser_error(ValueError("Exceeds the limit (4300 digits); use sys.set_int_max_str_digits() to …"))
    'Exceeds the limit (4300 digits)'
    """
    return str(error).partition("; use sys.")[0]


_UNITS: Final = (("years", 31_557_600), ("d", 86_400), ("h", 3_600), ("min", 60))


def instant(at_ms: int | None, *, exact: bool = False) -> str:
    """Format as ``2026-12-01T00:00:00Z``, as every table, text and page does; a dash for None. ``exact`` adds
    milliseconds, for programs, and for a form that sends the time back."""
    if at_ms is None:
        return "–"
    try:
        at = datetime.fromtimestamp(at_ms // 1000, UTC).replace(tzinfo=None).isoformat()
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"  # Beyond the calendar.
    return f"{at}.{at_ms % 1000:03d}Z" if exact else f"{at}Z"


def format_relative_time(at_ms: int | None, now_ms: int) -> str:
    """Format as ``in 3 d 4 h`` or ``2 min 5 s ago``, in the two largest units; "" for None. A page script agrees."""
    if at_ms is None:
        return ""
    rest, parts = abs(at_ms - now_ms) // 1000, []
    for unit, length in (*_UNITS, ("s", 1)):
        if count := rest // length:
            parts.append(f"{count} {'year' if unit == 'years' and count == 1 else unit}")
        if len(parts) == 2 or (parts and not count):
            break
        rest %= length
    text = " ".join(parts)
    return "now" if not text else f"in {text}" if at_ms > now_ms else f"{text} ago"


def duration(seconds: float | None) -> str:
    """Three digits in the largest unit that fits twice: ``1.92 h``, ``115 s``, ``40 ms``; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    unit, length = next(((unit, length) for unit, length in _UNITS if seconds >= 2 * length), ("s", 1))
    return f"{seconds / length:.3g} {unit}"


def size(amount: float) -> str:
    """Format bytes in the decimal units that disks are sold in: ``512 B``, ``4.2 GB``."""
    for length, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= length * 0.9995:
            return f"{amount / length:.3g} {unit}"
    return f"{amount:.0f} B"


def counted(number: int, noun: str) -> str:
    """``1 violation``, ``1,200 violations``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def delayed_rows(delayed: Mapping[str, int | None]) -> list[tuple[str, int | str]]:
    """Rows for the messages that the broker itself delays or forwards in each queue, and their sum. In ``delayed``,
    None means an unknown count; an empty mapping means that there are none."""
    if not delayed:
        return []
    if None in delayed.values():
        return [("all queues, delayed or forwarded by RabbitMQ itself", "unknown (see broker.management_url)")]
    found = {f"{name}, delayed or forwarded by RabbitMQ itself": count for name, count in delayed.items() if count}
    return [
        *found.items(),
        (f"all queues, delayed or forwarded by RabbitMQ itself up to {COUNTS_AGE:.0f} s ago", sum(found.values())),
    ]


_UNPRINTED_IN_JSON: Final = re.compile("[^\n -~]")


def escaped(text: str) -> str:
    r"""Escape unprintable characters (DEL, C1 controls, direction marks) of JSON as ``\uXXXX``. They occur only in
    strings, where both spellings mean the same. Line ends between the objects stay.

    >>> escaped('"a\u202eb\x9b"')
    '"a\\u202eb\\u009b"'
    """
    return _UNPRINTED_IN_JSON.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else json.dumps(match[0])[1:-1]
