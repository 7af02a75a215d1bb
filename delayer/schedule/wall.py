"""The wall clock of a zone: which instants its cron times are, also in the nights when the clocks change. Pure.

A time that the clocks skip is the first instant after the change, and a time that they repeat is the first of the two.
Expressions that name distances (``*/15 * * * *``) go by elapsed time: they skip with the clock, and repeat with it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from delayer.core.delay_headers import quote_value
from delayer.schedule.cron import is_fixed, next_wall

LONGEST_ZONE: Final = 100
"""The characters of an unknown name that are compared with all zones."""
_SECOND: Final = timedelta(seconds=1)


class UnknownZone(ValueError):
    """This host's zone data does not have the zone. The text names the expected and the found value."""


def zone_of(name: str) -> ZoneInfo:
    """Load a zone of the IANA database. Raises UnknownZone, and OSError if its file is there but cannot be read."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, IsADirectoryError, NotADirectoryError):
        raise UnknownZone(_unknown(name)) from None


def check_zone(name: str) -> None:
    """Raises UnknownZone even for a zone of this host only, such as ``localtime`` or a path."""
    if name == "localtime" or name not in _names():
        raise UnknownZone(_unknown(name))


def forget_zones() -> None:
    """Forget the zones that this process has loaded, because the host's zone data have changed."""
    ZoneInfo.clear_cache()
    _names.cache_clear()


@lru_cache(maxsize=1)
def _names() -> set[str]:
    """All zones. It reads hundreds of files, so only once."""
    return available_timezones()


def _unknown(name: str) -> str:
    known, given = {one.casefold(): one for one in sorted(_names())}, name[:LONGEST_ZONE].casefold()
    near = [known[one] for one in difflib.get_close_matches(given, known, 1)]
    # People often know the city, and not its continent.
    near = near or [one for one in known.values() if one.rpartition("/")[2].casefold() == given]
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"expected an IANA name such as Europe/Berlin or UTC, found {quote_value(name)}{hint}"


@lru_cache(maxsize=4096)
def next_instant(expression: str, zone: ZoneInfo, after: datetime) -> datetime | None:
    """Find the first instant of the expression later than ``after``, an instant in UTC. None if there is none. Repeats
    the answer for other schedules of one rhythm, which fire together. A zone that is loaded again is another object."""
    find = _next_fixed if is_fixed(expression) else _next_elapsed
    return find(lambda wall: next_wall(expression, wall), zone, after)


_Next = Callable[[datetime], datetime | None]


def _next_fixed(following: _Next, zone: ZoneInfo, after: datetime) -> datetime | None:
    here = after.astimezone(zone)
    wall = here.replace(tzinfo=None)
    if here.fold:  # The clock has shown all the times before the change.
        wall = _wall(_change(*_instants(wall, zone), zone) - _SECOND, zone)
    while (found := following(wall)) is not None:
        wall = found
        first, second = _instants(wall, zone)
        instant = first if first <= second else _change(second, first, zone)
        if instant > after:
            return instant
    return None


def _next_elapsed(following: _Next, zone: ZoneInfo, after: datetime) -> datetime | None:
    here = after.astimezone(zone)
    wall = here.replace(tzinfo=None)
    first, second = _instants(wall, zone)
    found = [_next_real(following, zone, wall, after)]
    if first < second and here.fold == 0:  # The clock will show this time again, and earlier ones before it.
        again = _wall(_change(first, second, zone), zone)
        found.append(_next_real(following, zone, again - _SECOND, after))
    return min((instant for instant in found if instant is not None), default=None)


def _next_real(following: _Next, zone: ZoneInfo, wall: datetime, after: datetime) -> datetime | None:
    """The first instant later than ``after`` of the first time later than ``wall`` that the clock really shows."""
    while (found := following(wall)) is not None:
        wall = found
        first, second = _instants(wall, zone)
        if first > second:
            wall = _wall(_change(second, first, zone), zone) - _SECOND
        elif (instant := first if first > after else second) > after:
            return instant
    return None


def _wall(instant: datetime, zone: ZoneInfo) -> datetime:
    return instant.astimezone(zone).replace(tzinfo=None)


def _instants(wall: datetime, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """The instants of a wall time by the offset before a nearby change, and by the offset after it. They are equal for
    most times, ascending for a time that the clock shows twice, and descending for one that it skips."""
    first, second = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    return first, second


def _change(low: datetime, high: datetime, zone: ZoneInfo) -> datetime:
    """The instant between these two at which the offset changes."""
    offset = high.astimezone(zone).utcoffset()
    low, high = low.replace(microsecond=0), high.replace(microsecond=0)
    while high - low > _SECOND:
        middle = low + (high - low) // (2 * _SECOND) * _SECOND
        low, high = (low, middle) if middle.astimezone(zone).utcoffset() == offset else (middle, high)
    return high
