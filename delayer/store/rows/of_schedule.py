"""The name of the schedule that made a message, found in SQL. A row's properties may have 128 KB, and a transaction may
delete thousands of rows, so only the header leaves the server."""

from __future__ import annotations

from typing import Final

from delayer.core.message import as_text
from delayer.schedule.schedule import SCHEDULE, is_name

HEADER: Final = bytes((len(SCHEDULE),)) + SCHEDULE + b"S\0\0\0"
"""What precedes the name of a schedule in the headers: the last byte of its length follows, and then the name."""
_LONGEST: Final = 255


def column(of: str = "") -> str:
    """An SQL column ``of_schedule`` for :func:`name_in`: the header of the row ``of`` and what follows it, or null."""
    header = f"'\\x{HEADER.hex()}'::bytea"
    at = f"position({header} IN {of}properties)"
    part = f"substring({of}properties FROM {at} FOR {len(HEADER) + 1 + _LONGEST})"
    return f"CASE WHEN {of}route = '' AND {at} > 0 THEN {part} END AS of_schedule"


def name_in(found: bytes | None) -> str | None:
    """The name in the value of :func:`column`; None if the header has no such name.

    >>> name_in(HEADER + b"\\x04tick" + b"more headers")
    'tick'
    """
    if found is None or len(found) <= len(HEADER):
        return None
    begin = len(HEADER) + 1
    name = as_text(found[begin : begin + found[len(HEADER)]])
    return name if is_name(name) else None
