"""Forms: what a person writes into a field, and what comes of it."""

from __future__ import annotations

import pytest

from delayer.core.filters import Filter
from delayer.ops.http.asked import Wrong, asked, instant, later, place, place_text, token

NOW = 1_800_000_000_000
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({}, Filter()),
        ({"route": "  ", "key": ""}, Filter()),
        ({"route": "in", "to": "out", "to_key": "k"}, Filter(route=b"in", exchange=b"out", routing_key=b"k")),
        ({"key": "café"}, Filter(key="café".encode())),
        ({"header": "customer=47=11"}, Filter(headers=((b"customer", "47=11"),))),
        ({"due_after": "2h", "due_before": "2027-01-15T09:00Z"},
         Filter(due_from_ms=NOW + 2 * HOUR, due_before_ms=NOW + HOUR)),
    ],
    ids=range(6),
)  # fmt: skip
def test_filters(form: dict[str, str], wanted: Filter) -> None:
    assert asked(form, NOW).wanted == wanted


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("2h", NOW + 2 * HOUR),
        ("+2h", NOW + 2 * HOUR),
        ("-30m", NOW - HOUR // 2),
        ("2027-01-15T08:00:00Z", NOW),
        ("2027-01-15T08:00", NOW),
        ("2027-01-15", NOW - 8 * HOUR),
        ("2027-01-15T09:00:00+01:00", NOW),
        ("2027-01-15T08:00:00.0001Z", NOW + 1),
    ],
)
def test_instants(text: str, at_ms: int) -> None:
    assert instant(text, NOW, "Due") == at_ms


@pytest.mark.parametrize("text", ["soon", "", "2", "2027-13-01", "<script>", "99999d"])
def test_what_is_no_instant_is_said(text: str) -> None:
    with pytest.raises(Wrong, match="Due: expected an instant"):
        instant(text, NOW, "Due")


@pytest.mark.parametrize(("text", "by_ms"), [("30m", HOUR // 2), ("+30m", HOUR // 2), ("-1h", -HOUR)])
def test_by_how_much(text: str, by_ms: int) -> None:
    assert later(text) == by_ms


@pytest.mark.parametrize(("form", "said"), [({"header": "x"}, "NAME=VALUE"), ({"header": "=x"}, "NAME=VALUE")])
def test_what_is_no_filter_is_said(form: dict[str, str], said: str) -> None:
    with pytest.raises(Wrong, match=said):
        asked(form, NOW)


def test_ids_and_pages() -> None:
    assert token("7@5") == (7, 5)
    assert place("") is None
    assert place(place_text((5, -1))) == (5, -1)
    for text in ("x", "1", "1.x", "1.2.3"):
        with pytest.raises(Wrong):
            place(text)
    with pytest.raises(Wrong):
        token("' OR 1=1")
