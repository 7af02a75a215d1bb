"""The names and bounds of the partitions by due day, and the days that have one. Only partitions.py changes them."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Final

import asyncpg

DAY_MS: Final = 86_400_000

_PREFIX = "message_p"
_EPOCH = date(1970, 1, 1)
_KNOWN = (
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'message'::regclass"
)


def name_of(day: int) -> str:
    """The partition of a day: ``message_pYYYYMMDD``."""
    return f"{_PREFIX}{_EPOCH + timedelta(days=day):%Y%m%d}"


def day_of(name: str) -> int | None:
    """The day of a partition's name; None for the default one, and for other names."""
    digits = name.removeprefix(_PREFIX)
    if digits == name or len(digits) != len("YYYYMMDD") or not (digits.isascii() and digits.isdigit()):
        return None
    try:
        found = date.fromisoformat(digits)
    except ValueError:
        return None
    return (found - _EPOCH).days


def bounds_of(day: int) -> tuple[str, str]:
    """First instant of the day and of the next, as SQL literals' text."""
    first = _EPOCH + timedelta(days=day)
    return f"{first} 00:00:00+00", f"{first + timedelta(days=1)} 00:00:00+00"


async def existing(connection: asyncpg.Connection) -> set[int]:
    """The days that have a partition."""
    return {day for (name,) in await connection.fetch(_KNOWN) if (day := day_of(name)) is not None}
