"""What a header says about time: delays and instants in whole milliseconds, and the one rounding. Pure.

Everything rounds up, so nothing is ever early: half a millisecond of a float delay, the fourth digit of an RFC 3339
fraction, the rest of a second before the cascade. Every path uses these functions: intake, release, imports, audit.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from decimal import Decimal
from typing import Final

from delayer.core.values import Timestamp

DAY_MS: Final = 86_400_000

_NUMBER = re.compile(r"[+-]?[0-9]{1,30}(\.[0-9]{1,30})?", re.ASCII)
# RFC 3339 section 5.6, with the lower-case letters and the space that its notes allow.
_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,30}))?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)


class UnreadableDelay(ValueError):
    """A header that should say a delay or an instant does not. The message says what was expected and found."""


def shown(value: object) -> str:
    """A value as it may stand in a reason: short, printable, on one line."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_delay_ms(value: object) -> int:
    """The relative delay that ``x-delay`` says, in ms, rounded up. Any AMQP integer, a numeric string, or a float.

    >>> read_delay_ms(1500), read_delay_ms("1500"), read_delay_ms(0.25), read_delay_ms(-3)
    (1500, 1500, 1, -3)

    Raises UnreadableDelay.
    """
    if type(value) is int:
        return value
    match value:
        case float() if math.isfinite(value):
            return math.ceil(value)
        case Decimal() if value.is_finite():
            return math.ceil(value)
        case str() if _NUMBER.fullmatch(value):
            return math.ceil(Decimal(value))
    raise UnreadableDelay(f"expected milliseconds as an integer, a numeric string or a float, found {shown(value)}")


def read_instant_ms(value: object) -> int:
    """The due instant that ``x-deliver-at`` says, in epoch ms, rounded up.

    Integer epoch milliseconds, an RFC 3339 string, or an AMQP timestamp (seconds). A numeric string is refused:
    nobody can tell whether it means seconds or milliseconds. Raises UnreadableDelay.

    >>> read_instant_ms("1970-01-01T00:00:01.0001Z"), read_instant_ms(Timestamp(7))
    (1001, 7000)
    """
    match value:
        case bool():
            pass
        case Timestamp():
            return int(value) * 1000
        case int():
            return value
        case str():
            instant = _rfc3339_ms(value)
            if instant is not None:
                return instant
    raise UnreadableDelay(
        "expected an instant as integer epoch milliseconds, an RFC 3339 string with its offset (Z, +01:00) or an AMQP "
        "timestamp, "
        f"found {shown(value)}"
    )


def _rfc3339_ms(text: str) -> int | None:
    found = _RFC3339.fullmatch(text)
    if found is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    fraction, sign, off_hour, off_minute = found.groups()[6:]
    # A leap second (:60) is the first instant of the next minute: epoch time has no other name for it.
    if not (1 <= month <= 12 and 1 <= day <= _days_in(year, month) and hour <= 23 and minute <= 59 and second <= 60):
        return None
    offset = 0
    if sign:
        if int(off_hour) > 23 or int(off_minute) > 59:
            return None
        offset = (int(off_hour) * 60 + int(off_minute)) * (60 if sign == "+" else -60)
    seconds = _days_from_epoch(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset
    return seconds * 1000 + (math.ceil(Decimal("0." + fraction) * 1000) if fraction else 0)


def _days_in(year: int, month: int) -> int:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def _days_from_epoch(year: int, month: int, day: int) -> int:
    """Days from 1970-01-01 in the proleptic Gregorian calendar; unlike ``datetime`` it knows the year 0.

    The year is taken to begin in March, so that the leap day is its last; an era is 400 years, 146,097 days.
    """
    year -= month <= 2
    era, year_of_era = divmod(year, 400)
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


def seconds_until(due_ms: int, now_ms: int) -> int:
    """Whole seconds from now to the due instant, rounded up; the past is zero."""
    return max(0, -((now_ms - due_ms) // 1000))


def in_words(milliseconds: int) -> str:
    """A delay for people: ``268435456 s`` reads badly in a reason.

    >>> in_words(90_061_000), in_words(172_800_000), in_words(1500)
    ('1 day, 1:01:01', '2 days', '1.5 s')
    """
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g} s"
    try:
        return str(timedelta(milliseconds=milliseconds)).removesuffix(", 0:00:00")
    except OverflowError:
        return f"{milliseconds // DAY_MS} days"
