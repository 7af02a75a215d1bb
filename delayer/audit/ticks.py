"""Where the marks of a time axis stand and what they say, in UTC. Pure.

Round instants, and below a mark its day or year wherever that is another than the last mark's: any part of the axis
tells when it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
_STEPS: Final = (
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 3, 6, 12)),
    *(n * _DAY for n in (1, 2, 7, 14)),
)
_MONTHS: Final = (1, 2, 3, 6, 12, 24, 60, 120, 240, 600, 1200, 2400, 6000, 12_000, 30_000)
_MONTH_MS: Final = 30.4 * _DAY


class Tick(NamedTuple):
    at_ms: int
    label: str


def ticks(first_ms: int, last_ms: int, room: int) -> list[Tick]:
    """About ``room`` marks at most from ``first_ms`` to ``last_ms``; both lie in the years 1 to 9000."""
    span = last_ms - first_ms
    step = next((one for one in _STEPS if span <= one * room), None)
    if step is not None:
        instants = range(-(-first_ms // step) * step, last_ms + 1, step)
        forms = ("%H:%M", "%-d %b") if step < _DAY else ("%-d %b", "%Y")
        return _labelled(instants, *forms)
    months = next((one for one in _MONTHS if span <= one * _MONTH_MS * room), _MONTHS[-1])
    forms = ("%b", "%Y") if months < 12 else ("%Y", "")
    return _labelled(_months(first_ms, last_ms, months), *forms)


def _months(first_ms: int, last_ms: int, step: int) -> Iterator[int]:
    first = datetime.fromtimestamp(first_ms // 1000, UTC)
    number = (first.year * 12 + first.month - 1) // step * step
    while number < 12 * 9999:
        at = datetime(max(number // 12, 1), number % 12 + 1, 1, tzinfo=UTC)
        at_ms = int(at.timestamp()) * 1000
        if at_ms > last_ms:
            return
        if at_ms >= first_ms:
            yield at_ms
        number += step


def _labelled(instants: Iterator[int] | range, form: str, context_form: str) -> list[Tick]:
    found, before = [], ""
    for at_ms in instants:
        at = datetime.fromtimestamp(at_ms // 1000, UTC)
        context = at.strftime(context_form)
        found.append(Tick(at_ms, at.strftime(form) + (f"\n{context}" if context != before else "")))
        before = context
    return found
