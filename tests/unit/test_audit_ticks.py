"""The marks of a time axis."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from delayer.audit.ticks import ticks

HOUR, DAY = 3_600_000, 86_400_000


def ms(*when: int) -> int:
    return int(datetime(*when, tzinfo=UTC).timestamp()) * 1000  # type: ignore[arg-type,misc]


@pytest.mark.parametrize(
    ("first", "last", "labels"),
    [
        (ms(2025, 11, 22, 21, 30), ms(2025, 11, 23, 2), ["22:00\n22 Nov", "23:00", "00:00\n23 Nov", "01:00", "02:00"]),
        (ms(2025, 12, 30, 5), ms(2026, 1, 2), ["31 Dec\n2025", "1 Jan\n2026", "2 Jan"]),
        (ms(2025, 11, 22), ms(2026, 2, 28), ["Dec\n2025", "Jan\n2026", "Feb"]),
        (ms(2025, 11, 22), ms(2035, 11, 22), ["2030", "2035"]),
        (ms(1970, 1, 1), ms(8999, 1, 1), ["2000", "3000", "4000", "5000", "6000", "7000", "8000"]),
    ],
)
def test_round_instants_and_their_day_or_year(first: int, last: int, labels: list[str]) -> None:
    room = 8 if last - first > 5000 * 365 * DAY else 5
    assert [tick.label for tick in ticks(first, last, room)] == labels


@pytest.mark.parametrize("room", [3, 5, 12])
@pytest.mark.parametrize(
    "span", [60_000, HOUR, 7 * HOUR, DAY, 3 * DAY, 40 * DAY, 200 * DAY, 4_000 * DAY, 2_000_000 * DAY]
)
def test_never_more_than_there_is_room_for(room: int, span: int) -> None:
    first = ms(2025, 11, 22, 7, 13, 5)
    found = ticks(first, first + span, room)
    assert len(found) <= room + 1
    assert all(first <= tick.at_ms <= first + span for tick in found)
    assert found or span < HOUR
